"""Whatever a request holds: it is read, or refused with an error that is the caller's own. Nothing else comes out."""

import json
import struct

from hypothesis import given, settings
from hypothesis import strategies as st

from pdmesh.runtime.errors import InvalidArgument, NotFound
from pdmesh.third_party.kserve import grpc_service_pb2 as pb
from router.api.kserve.requests import NAMES, Ask
from router.api.kserve.responses import Answer
from router.api.kserve.tensors import INPUTS, OUTPUTS, Inputs, add_output
from tests.router.kserve.calls import ids, output, packed, text

names = st.sampled_from([*INPUTS, "x", ""])
shapes = st.lists(st.integers(-2, 3) | st.sampled_from([2**62, -(2**63)]), max_size=3)
datatypes = st.sampled_from(["BYTES", "BOOL", "INT32", "INT64", "UINT64", "FP32", "", "FP16"])
contents = st.builds(
    lambda fields: pb.InferTensorContents(**fields),
    st.fixed_dictionaries(
        {},
        optional={
            "bytes_contents": st.lists(st.binary(max_size=8), max_size=2),
            "bool_contents": st.lists(st.booleans(), max_size=2),
            "int64_contents": st.lists(st.integers(-(2**63), 2**63 - 1), max_size=3),
            "int_contents": st.lists(st.integers(-5, 400), max_size=3),
        },
    ),
)
tensors = st.builds(
    lambda name, datatype, shape, elements: pb.ModelInferRequest.InferInputTensor(
        name=name, datatype=datatype, shape=shape, contents=elements
    ),
    names,
    datatypes,
    shapes,
    contents,
)
json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["0.5", "[1]", '["a"]', "-1"]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["regex", "json", "choice", "x"]), inner, max_size=2)
    ),
    max_leaves=4,
)
parameters = st.dictionaries(st.sampled_from([*NAMES, "x"]), json_values, max_size=4)


def _read(request: pb.ModelInferRequest) -> Ask | None:
    try:
        ask = Ask.read(request, can_stream=True)
    except (InvalidArgument, NotFound) as error:
        assert error.field and error.field in error.message
        return None
    request.SerializeToString()
    ask.message.SerializeToString()  # nothing in it that protobuf cannot send
    return ask


@settings(max_examples=100, deadline=None)
@given(st.lists(tensors, max_size=3), st.lists(st.binary(max_size=12), max_size=2))
def test_tensors(inputs: list[pb.ModelInferRequest.InferInputTensor], raw: list[bytes]) -> None:
    _read(pb.ModelInferRequest(inputs=inputs, raw_input_contents=raw))


@settings(max_examples=150, deadline=None)
@given(parameters)
def test_parameters(values: dict[str, object]) -> None:
    _read(pb.ModelInferRequest(inputs=[ids(), text("sampling_parameters", json.dumps(values))]))


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=30) | json_values.map(json.dumps))
def test_messages(value: str) -> None:
    _read(pb.ModelInferRequest(inputs=[text("messages", value)]))


@given(st.lists(st.integers(-(2**31), 2**31 - 1), max_size=5), st.lists(st.text(max_size=5), max_size=4))
def test_what_is_written_is_what_was_meant(numbers: list[int], texts: list[str]) -> None:
    response = pb.ModelInferResponse()
    add_output(response, "output_ids", numbers)
    add_output(response, "text_output", [value.encode() for value in texts])
    assert output(response, "output_ids") == numbers and output(response, "text_output") == texts


@given(st.binary(min_size=1, max_size=30))
def test_raw_text_is_read_as_it_was_packed(value: bytes) -> None:
    tensor = pb.ModelInferRequest.InferInputTensor(name="text_input", datatype="BYTES", shape=[1])
    request = pb.ModelInferRequest(inputs=[tensor], raw_input_contents=[packed("BYTES", [value])])
    assert Inputs.read(request).elements["text_input"] == [value]
    longer = struct.pack("<I", len(value) + 1) + value
    try:
        Inputs.read(pb.ModelInferRequest(inputs=[tensor], raw_input_contents=[longer]))
    except InvalidArgument as error:
        assert error.field == 'inputs["text_input"]'
    else:
        raise AssertionError("a length beyond the end was read")


def test_every_output_can_be_made() -> None:
    """Of an answer of which nothing came, too."""
    ask = Ask.read(pb.ModelInferRequest(inputs=[ids()]), can_stream=False)
    asked = pb.ModelInferRequest(
        inputs=[ids()], outputs=[pb.ModelInferRequest.InferRequestedOutputTensor(name=name) for name in OUTPUTS]
    )
    assert Ask.read(asked, can_stream=False).outputs == tuple(OUTPUTS)
    assert not Answer(ask).whole().outputs
