"""Sampling parameters of OpenAI's requests, and those that vLLM has made common, as `SamplingParams`."""

from __future__ import annotations

from pdmesh.v1 import common_pb2
from router.api.openai import constraint
from router.api.openai.fields import MAX_UINT32, Fields, as_integer, as_text
from router.api.sampling import MAX_STOP_STRINGS, MAX_STOP_TOKENS, MIN_TEMPERATURE
from router.api.validation import MAX_CHOICES, refuse

_NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
LEAST_TOP_P = 1e-6
_INTEGERS = ("n", "min_tokens", "max_tokens")


def read_sampling(fields: Fields) -> tuple[common_pb2.SamplingParams, dict[str, str]]:
    """What both endpoints have in common, with names for `errors.renamed`. Ranges are the router's to check, but what does not
    fit the wire is refused here. Raises InvalidArgument."""
    sampling = common_pb2.SamplingParams(ignore_eos=fields.flag("ignore_eos"))
    for name in _NUMBERS:
        number = fields.number(name)
        if number is not None:
            setattr(sampling, name, number)
    if 0 < sampling.temperature < MIN_TEMPERATURE:
        sampling.temperature = 0  # OpenAI's range has no gap between greedy and the coldest that can be computed
    if sampling.HasField("top_p") and sampling.top_p == 0:
        sampling.top_p = LEAST_TOP_P  # the likeliest token always stays
    for name in _INTEGERS:
        # What is made for each choice is made before the router looks at the request.
        high = MAX_CHOICES if name == "n" else MAX_UINT32
        integer = fields.integer(name, low=0 if name == "min_tokens" else 1, high=high)
        if integer is not None:
            setattr(sampling, name, integer)
    top_k = fields.integer("top_k", low=-1)
    sampling.top_k = max(0, top_k or 0)  # -1 is vLLM's word for all
    seed = fields.integer("seed", low=-(2**63), high=2**64 - 1)
    if seed is not None:
        sampling.seed = seed % 2**64
    stop_token_ids = fields.items("stop_token_ids") or []
    if len(stop_token_ids) > MAX_STOP_TOKENS:
        refuse("stop_token_ids", f"{len(stop_token_ids)} tokens are more than {MAX_STOP_TOKENS}")
    sampling.stop_token_ids.extend(as_integer(f"stop_token_ids[{at}]", value) for at, value in enumerate(stop_token_ids))
    names = _read_stop(fields, sampling)
    wanted = constraint.read_constraint(fields)
    if wanted is not None:
        sampling.constraint.CopyFrom(wanted.constraint)
        kind = wanted.constraint.WhichOneof("kind")
        names |= {"sampling.constraint": wanted.param, f"sampling.constraint.{kind}": wanted.param}
    return sampling, names


def _read_stop(fields: Fields, sampling: common_pb2.SamplingParams) -> dict[str, str]:
    value = fields.value("stop")
    if isinstance(value, str):
        sampling.stop.append(as_text("stop", value))
        return {"sampling.stop[0]": "stop"}
    if value is not None and not isinstance(value, list):
        refuse("stop", "is neither a string nor an array of strings")
    if value is not None and len(value) > MAX_STOP_STRINGS:
        refuse("stop", f"{len(value)} strings are more than {MAX_STOP_STRINGS}")
    sampling.stop.extend(as_text(f"stop[{number}]", text) for number, text in enumerate(value or []))
    return {}
