"""Values for sampling parameters that a test has no list of its own for: a new parameter is compared on all samplers at once."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from pdmesh.sampling_params import DRAWN, Kind, Parameter, Range

MOST = 100  # where a range has no end


def other_values(listed: Collection[str]) -> Mapping[str, list[float]]:
    """By name, for each parameter of a sampler's record that is not `listed`."""
    return {parameter.name: _values(parameter) for parameter in DRAWN if parameter.name not in listed}


def _values(parameter: Parameter) -> list[float]:
    """The default, as most requests have it, and some of the range that a client may ask for."""
    served = parameter.rules.served or parameter.rules.computed or Range(0, MOST)
    high = min(served.high, MOST)
    others = [served.low + (high - served.low) * share for share in (0.01, 0.1, 0.5, 0.9)]
    kept = map(int, others) if parameter.kind is Kind.COUNT else others
    return [parameter.default, parameter.default, *kept]
