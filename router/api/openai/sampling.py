"""Sampling parameters of OpenAI's requests, and those that vLLM has made common, as `SamplingParams`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import NamedTuple

from pdmesh.sampling_params import LEAST_TOP_P, MAX_CHOICES, MIN_TEMPERATURE, NUMBERS, PARAMETERS, Kind
from pdmesh.text.grammar import MAX_BYTES
from pdmesh.v1 import common_pb2
from router.api.http.fields import MAX_UINT32, Fields, JsonObject, as_integer, as_text
from router.api.validation import MAX_STOP_STRINGS, MAX_STOP_TOKENS, refuse

# Constraints on the output: OpenAI's `response_format`, and vLLM's `structured_outputs` and older `guided_*`.

JSON_OBJECT = '{"type":"object"}'


class Wanted(NamedTuple):
    """Hold a constraint and the field that asked for it."""

    param: str
    constraint: common_pb2.Constraint


Reader = Callable[[Fields, str], common_pb2.Constraint]


def read_constraint(fields: Fields) -> Wanted | None:
    """Return the constraint of a request; None without one. Raises InvalidArgument, also for two."""
    wanted = [*_response_format(fields), *_structured_outputs(fields), *_guided(fields)]
    if len(wanted) > 1:
        refuse(wanted[1].param, f"excludes {wanted[0].param}; give one of them")
    if wanted and (size := wanted[0].constraint.ByteSize()) > 2 * MAX_BYTES:  # before it is copied for each prompt
        refuse(wanted[0].param, f"has about {size} bytes; at most {MAX_BYTES} are allowed")
    return wanted[0] if wanted else None


def _response_format(fields: Fields) -> Iterator[Wanted]:
    wanted = fields.inner("response_format")
    if wanted is None:
        return
    kind = wanted.text("type")
    if kind == "json_object":
        yield Wanted("response_format", common_pb2.Constraint(json_schema=JSON_OBJECT))
    elif kind == "json_schema":
        named = wanted.inner("json_schema")
        if named is None:
            refuse("response_format.json_schema", "is missing")
        named.text("name")
        named.text("description")
        named.flag("strict")  # the output follows the schema in any case
        schema = named.inner("schema")
        text = "{}" if schema is None else _as_json(named, "schema")
        named.finish((), {})
        yield Wanted("response_format.json_schema.schema", common_pb2.Constraint(json_schema=text))
    elif kind != "text":
        refuse("response_format.type", 'is none of "text", "json_object", "json_schema"')
    wanted.finish((), {})


def _structured_outputs(fields: Fields) -> Iterator[Wanted]:
    wanted = fields.inner("structured_outputs")
    if wanted is None:
        return
    for name, reader in _READERS.items():
        if wanted.has(name):
            yield Wanted(wanted.param(name), reader(wanted, name))
    if wanted.flag("json_object"):
        yield Wanted(wanted.param("json_object"), common_pb2.Constraint(json_schema=JSON_OBJECT))
    wanted.finish({"disable_fallback"}, {"disable_any_whitespace": (False,), "disable_additional_properties": (False,)})


def _guided(fields: Fields) -> Iterator[Wanted]:
    for name, reader in _READERS.items():
        if fields.has(f"guided_{name}"):
            yield Wanted(f"guided_{name}", reader(fields, f"guided_{name}"))


def _json(fields: Fields, name: str) -> common_pb2.Constraint:
    """Read a schema as an object, or as its text."""
    return common_pb2.Constraint(json_schema=_as_json(fields, name))


def _as_json(fields: Fields, name: str) -> str:
    value = fields.value(name)
    if isinstance(value, str):
        return as_text(fields.param(name), value)
    if not isinstance(value, dict | bool):
        refuse(fields.param(name), "is not a JSON Schema")
    return json.dumps(value, separators=(",", ":"))


def _regex(fields: Fields, name: str) -> common_pb2.Constraint:
    return common_pb2.Constraint(regex=as_text(fields.param(name), fields.value(name)))


def _grammar(fields: Fields, name: str) -> common_pb2.Constraint:
    return common_pb2.Constraint(grammar=as_text(fields.param(name), fields.value(name)))


def _choice(fields: Fields, name: str) -> common_pb2.Constraint:
    param = fields.param(name)
    values = [as_text(f"{param}[{number}]", value) for number, value in enumerate(fields.items(name) or [])]
    return common_pb2.Constraint(choice=common_pb2.Alternatives(values=values))


_READERS: dict[str, Reader] = {"json": _json, "regex": _regex, "choice": _choice, "grammar": _grammar}


# Each endpoint has a way of its own to ask for log-probabilities.
_COUNTS = tuple(parameter for parameter in PARAMETERS if parameter.kind is Kind.COUNT and parameter.name != "logprobs")
# What differs from an unsigned number of 32 bits. What is made for each choice is made before the router looks at the request.
_LIMITS = {"n": (1, MAX_CHOICES), "max_tokens": (1, MAX_UINT32), "seed": (-(2**63), 2**64 - 1)}


def read_sampling(fields: Fields) -> tuple[common_pb2.SamplingParams, dict[str, str]]:
    """Return the parameters that both endpoints have in common, and names for `errors.renamed`. The router checks ranges; a value
    that does not fit the wire is refused here. Raises InvalidArgument."""
    sampling = common_pb2.SamplingParams(ignore_eos=fields.flag("ignore_eos"))
    for parameter in NUMBERS:
        number = fields.number(parameter.name)
        if number is not None:
            setattr(sampling, parameter.name, number)
    if 0 < sampling.temperature < MIN_TEMPERATURE:
        sampling.temperature = 0  # OpenAI's range has no gap between greedy and the lowest temperature that can be computed
    if sampling.HasField("top_p") and sampling.top_p == 0:
        sampling.top_p = LEAST_TOP_P  # the likeliest token always stays
    _read_counts(fields, sampling)
    stop_token_ids = fields.items("stop_token_ids") or []
    if len(stop_token_ids) > MAX_STOP_TOKENS:
        refuse("stop_token_ids", f"{len(stop_token_ids)} tokens are more than {MAX_STOP_TOKENS}")
    sampling.stop_token_ids.extend(as_integer(f"stop_token_ids[{at}]", value) for at, value in enumerate(stop_token_ids))
    names = _read_stop(fields, sampling)
    wanted = read_constraint(fields)
    if wanted is not None:
        sampling.constraint.CopyFrom(wanted.constraint)
        kind = wanted.constraint.WhichOneof("kind")
        names |= {"sampling.constraint": wanted.param, f"sampling.constraint.{kind}": wanted.param}
    return sampling, names


def set_parameters(sampling: common_pb2.SamplingParams) -> JsonObject:
    """Return the parameters that are set, by name."""
    return {descriptor.name: value for descriptor, value in sampling.ListFields()}


def _read_counts(fields: Fields, sampling: common_pb2.SamplingParams) -> None:
    for parameter in _COUNTS:
        name, is_minus_one_all = parameter.name, parameter.rules.is_minus_one_all
        low, high = _LIMITS.get(name, (-1 if is_minus_one_all else 0, MAX_UINT32))
        integer = fields.integer(name, low, high)
        if integer is not None:
            setattr(sampling, name, max(0, integer) if is_minus_one_all else integer % 2**parameter.rules.bits)


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
