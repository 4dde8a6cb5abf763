"""Sampling parameters of OpenAI's requests, and those that vLLM has made common, as `SamplingParams`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from pdmesh.sampling_params import PARAMETERS, Kind
from pdmesh.text.grammar import MAX_BYTES
from pdmesh.v1 import common_pb2
from router.api.http.fields import JsonObject
from router.api.http.types import drawn
from router.api.openai.bodies import JsonObjectFormat, JsonSchemaFormat, ResponseFormat, Sampling, StructuredOutputs
from router.api.validation import refuse

# Constraints on the output: OpenAI's `response_format`, and vLLM's `structured_outputs` and older `guided_*`.

JSON_OBJECT = '{"type":"object"}'


class Wanted(NamedTuple):
    """Hold a constraint and the field that asked for it."""

    param: str
    constraint: common_pb2.Constraint


def read_constraint(asked: Sampling) -> Wanted | None:
    """Return the constraint of a request; None without one. Raises InvalidArgument, also for two."""
    wanted = [*_response_format(asked.response_format), *_structured_outputs(asked.structured_outputs), *_guided(asked)]
    if len(wanted) > 1:
        refuse(wanted[1].param, f"excludes {wanted[0].param}; give one of them")
    if wanted and (size := wanted[0].constraint.ByteSize()) > 2 * MAX_BYTES:  # before it is copied for each prompt
        refuse(wanted[0].param, f"has about {size} bytes; at most {MAX_BYTES} are allowed")
    return wanted[0] if wanted else None


def _response_format(asked: ResponseFormat | None) -> Iterator[Wanted]:
    if isinstance(asked, JsonObjectFormat):
        yield Wanted("response_format", common_pb2.Constraint(json_schema=JSON_OBJECT))
    elif isinstance(asked, JsonSchemaFormat):
        schema = asked.json_schema.json_schema
        yield Wanted("response_format.json_schema.schema", common_pb2.Constraint(json_schema=schema))


def _structured_outputs(asked: StructuredOutputs | None) -> Iterator[Wanted]:
    if asked is None:
        return
    yield from _constraints("structured_outputs.", asked.json_text, asked.regex, asked.choice, asked.grammar)
    if asked.json_object:
        yield Wanted("structured_outputs.json_object", common_pb2.Constraint(json_schema=JSON_OBJECT))


def _guided(asked: Sampling) -> Iterator[Wanted]:
    return _constraints("guided_", asked.guided_json, asked.guided_regex, asked.guided_choice, asked.guided_grammar)


def _constraints(
    prefix: str, schema: str | None, regex: str | None, choice: list[str] | None, grammar: str | None
) -> Iterator[Wanted]:
    if schema is not None:
        yield Wanted(f"{prefix}json", common_pb2.Constraint(json_schema=schema))
    if regex is not None:
        yield Wanted(f"{prefix}regex", common_pb2.Constraint(regex=regex))
    if choice is not None:
        yield Wanted(f"{prefix}choice", common_pb2.Constraint(choice=common_pb2.Alternatives(values=choice)))
    if grammar is not None:
        yield Wanted(f"{prefix}grammar", common_pb2.Constraint(grammar=grammar))


# Each endpoint has a way of its own to ask for log-probabilities.
_COUNTS = tuple(
    parameter for parameter in PARAMETERS if parameter.kind is Kind.COUNT and parameter.name not in ("logprobs", "top_k", "seed")
)


def read_sampling(asked: Sampling) -> tuple[common_pb2.SamplingParams, dict[str, str]]:
    """Return the parameters that both endpoints have in common, and names for `errors.renamed`. The router checks ranges; a value
    that does not fit the wire has been refused. Raises InvalidArgument."""
    sampling = drawn(asked)
    sampling.ignore_eos = asked.ignore_eos
    sampling.stop_token_ids.extend(asked.stop_token_ids or ())
    _set_counts(asked, sampling)
    for token_id, bias in (asked.logit_bias or {}).items():
        sampling.logit_bias.add(token_id=int(token_id), bias=bias)
    names = _read_stop(asked, sampling)
    wanted = read_constraint(asked)
    if wanted is not None:
        sampling.constraint.CopyFrom(wanted.constraint)
        kind = wanted.constraint.WhichOneof("kind")
        names |= {"sampling.constraint": wanted.param, f"sampling.constraint.{kind}": wanted.param}
    return sampling, names


def set_parameters(sampling: common_pb2.SamplingParams) -> JsonObject:
    """Return the parameters that are set, by name."""
    return {descriptor.name: value for descriptor, value in sampling.ListFields()}


def _set_counts(asked: Sampling, sampling: common_pb2.SamplingParams) -> None:
    for parameter in _COUNTS:
        integer = getattr(asked, parameter.name)
        if integer is not None:
            setattr(sampling, parameter.name, integer)


def _read_stop(asked: Sampling, sampling: common_pb2.SamplingParams) -> dict[str, str]:
    if isinstance(asked.stop, str):
        sampling.stop.append(asked.stop)
        return {"sampling.stop[0]": "stop"}
    sampling.stop.extend(asked.stop or ())
    return {}
