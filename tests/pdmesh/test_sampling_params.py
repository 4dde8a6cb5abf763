"""One description of the sampling parameters, which the wire, the client and each protocol follow."""

from __future__ import annotations

from typing import Any, get_type_hints

import pytest
from google.protobuf.descriptor import FieldDescriptor

from pdmesh.client.types import GenerateOptions
from pdmesh.sampling_params import PARAMETERS, Kind, Parameter, SamplingOptions, SamplingParams
from pdmesh.v1 import common_pb2
from router.api.http.fields import Fields
from router.api.kserve import requests
from router.api.openai.sampling import read_sampling
from router.api.validation import Limits, complete

LIMITS = Limits(vocab_size=320, eos_token_ids=frozenset({258}), room=100)
WIRE = common_pb2.SamplingParams.DESCRIPTOR.fields_by_name
OF_THE_ROUTER = {"stop", "constraint"}  # the engine gets neither
WIRE_TYPES = {
    Kind.NUMBER: {FieldDescriptor.TYPE_DOUBLE}, Kind.COUNT: {FieldDescriptor.TYPE_UINT32, FieldDescriptor.TYPE_UINT64},
    Kind.FLAG: {FieldDescriptor.TYPE_BOOL}, Kind.TOKENS: {FieldDescriptor.TYPE_UINT32},
}  # fmt: skip


def test_wire_and_client_have_the_same_parameters() -> None:
    names = {parameter.name for parameter in PARAMETERS}
    assert names == set(WIRE) - OF_THE_ROUTER == set(get_type_hints(SamplingOptions))
    assert names <= set(get_type_hints(GenerateOptions))


@pytest.mark.parametrize("parameter", PARAMETERS, ids=lambda parameter: parameter.name)
def test_the_wire_can_hold_a_parameter(parameter: Parameter) -> None:
    field = WIRE[parameter.name]
    assert field.type in WIRE_TYPES[parameter.kind]
    assert field.is_repeated == (parameter.kind is Kind.TOKENS)
    assert parameter.rules.bits == (64 if field.type == FieldDescriptor.TYPE_UINT64 else 32)
    # What a worker makes of a 0 that cannot be told from absence is the default, which has to mean the same.
    assert field.has_presence or not parameter.default or parameter.name == "n"


@pytest.mark.parametrize("parameter", PARAMETERS, ids=lambda parameter: parameter.name)
def test_every_protocol_reads_a_parameter_to_its_field(parameter: Parameter) -> None:
    value = {Kind.NUMBER: 0.5, Kind.COUNT: 3, Kind.FLAG: True, Kind.TOKENS: [3]}[parameter.kind]
    wanted = common_pb2.SamplingParams(**{parameter.name: value})  # type: ignore[arg-type]
    assert complete(wanted, LIMITS) is not None
    assert parameter.name in requests.NAMES
    if parameter.name != "logprobs":  # asked for in another way
        sampling, _ = read_sampling(Fields({parameter.name: value}))
        assert sampling == wanted


@pytest.mark.parametrize(
    ("name", "value", "served", "computed"),
    [
        ("temperature", 1e-9, "1e-09 is neither 0 (greedy) nor in [0.0001, 100]", None),
        ("temperature", -1.0, "-1.0 is neither 0 (greedy) nor in [0.0001, 100]", "at least 0 (0 is greedy)"),
        ("top_p", 0.0, "0.0 is not in (0, 1]", "in (0, 1]"),
        ("min_p", 1.5, "1.5 is not in [0, 1]", "in [0, 1]"),
        ("repetition_penalty", 0.0, "0.0 is not in [0.01, 100]; 1 is none", "more than 0"),
        ("presence_penalty", 2.5, "2.5 is not in [-2, 2]", None),
        ("n", 17, "17 is more than 16", None),
        ("logprobs", 21, "21 is more than 20", None),
        ("top_k", 2**32 - 1, None, None),
        ("top_k", -1, None, "at least 0 (0 is all tokens)"),
        ("seed", 2**64, None, "an unsigned 64-bit number"),
        ("stop_token_ids", (3, -1), None, "token ids, at least 0"),
        ("min_tokens", 6, None, "in [0, max_tokens=5]"),
    ],
)
def test_what_is_said_of_a_wrong_value(name: str, value: Any, served: str | None, computed: str | None) -> None:
    """`served`: to a client, `computed`: by the engine."""
    if served is not None:
        assert next(each for each in PARAMETERS if each.name == name).refusal(value) == served
    params = SamplingParams(**{"max_tokens": 5, name: value})
    if computed is None:
        params.validate()
        return
    with pytest.raises(ValueError) as refused:
        params.validate()
    assert str(refused.value) == f"{name}: {value} is not allowed; it must be {computed}"
