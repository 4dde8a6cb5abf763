"""Tensors of the protocol to Python values and back. Bytes on the wire are little-endian; each BYTES element follows its length.
Every error names the tensor: inputs["text_input"]."""

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pdmesh.third_party.kserve import grpc_service_pb2 as pb
from pdmesh.third_party.kserve import model_config_pb2 as config_pb
from router.api.protocol_errors import package_version
from router.api.validation import refuse

# The tensors of a model, as its metadata lists them, with the names that Triton's backends for language models use.

VERSION = "1"
PLATFORM = "pdmesh"


@dataclass(frozen=True)
class Tensor:
    """Describe one input or output. `shape`: (1,) for one element, (-1,) for any number. `datatypes`: those accepted, the usual
    one first."""

    name: str
    datatypes: tuple[str, ...]
    shape: tuple[int, ...] = (1,)

    @property
    def datatype(self) -> str:
        """Return the usual datatype, which outputs have and metadata shows."""
        return self.datatypes[0]


_ID_TYPES = ("INT32", "INT64", "UINT32", "UINT64")
FLAGS = {
    # input → the outputs that it adds
    "return_finish_reason": "finish_reason",
    "return_cumulative_logprob": "cumulative_logprob",
    "return_logprobs": "logprobs",
    "return_num_input_tokens": "num_input_tokens",
    "return_num_output_tokens": "num_output_tokens",
}
INPUTS = {
    tensor.name: tensor
    for tensor in (
        Tensor("text_input", ("BYTES",)),  # exactly one of the first three
        Tensor("messages", ("BYTES",)),  # JSON: [{"role": …, "content": …}, …]
        Tensor("input_ids", _ID_TYPES, (-1,)),
        Tensor("sampling_parameters", ("BYTES",)),  # JSON object
        Tensor("stream", ("BOOL",)),
        Tensor("exclude_input_in_output", ("BOOL",)),
        *(Tensor(name, ("BOOL",)) for name in FLAGS),
    )
}
OUTPUTS = {
    tensor.name: tensor
    for tensor in (
        Tensor("text_output", ("BYTES",), (-1,)),
        Tensor("output_ids", ("INT32",), (-1,)),  # the choices one after the other
        Tensor("finish_reason", ("BYTES",), (-1,)),  # "stop", "length", "abort"; "" while the choice continues
        Tensor("stop_reason", ("BYTES",), (-1,)),
        Tensor("logprobs", ("BYTES",), (-1,)),  # JSON, one entry for each token
        Tensor("prompt_logprobs", ("BYTES",), (-1,)),  # the same of the prompt, with the first piece of one choice
        Tensor("cumulative_logprob", ("FP32",), (-1,)),
        Tensor("index", ("UINT32",), (-1,)),  # of the choice
        Tensor("num_output_tokens", ("UINT32",), (-1,)),
        Tensor("num_input_tokens", ("UINT32",)),
        Tensor("num_cached_tokens", ("UINT32",)),
        Tensor("num_drafted_tokens", ("UINT32",)),
        Tensor("num_accepted_tokens", ("UINT32",)),
        Tensor("seed", ("UINT64",)),
    )
}
# The outputs of a request that lists none.
WHOLE_OUTPUTS = ("text_output", "output_ids", "finish_reason", "num_input_tokens", "num_output_tokens", "num_cached_tokens")
PIECE_OUTPUTS = ("text_output", "output_ids", "finish_reason", "index")
# Known only when the response is complete, so never in a streamed piece.
LATE_OUTPUTS = frozenset({"num_cached_tokens", "num_drafted_tokens", "num_accepted_tokens"})


Element = bytes | bool | int | float
# datatype → (letter of struct, field of InferTensorContents)
MAX_DIMENSIONS = 8  # bounds the product of the dimensions
_FORMATS = {
    "BOOL": ("?", "bool_contents"),
    "INT32": ("i", "int_contents"),
    "INT64": ("q", "int64_contents"),
    "UINT32": ("I", "uint_contents"),
    "UINT64": ("Q", "uint64_contents"),
    "FP32": ("f", "fp32_contents"),
    "BYTES": ("", "bytes_contents"),
}
_LENGTH = struct.Struct("<I")


@dataclass(frozen=True)
class Inputs:
    """Hold the inputs of a request by name, each as the flat list of its elements."""

    elements: Mapping[str, Sequence[Element]]

    @classmethod
    def read(cls, request: pb.ModelInferRequest) -> "Inputs":
        """Read and check all inputs. Raises InvalidArgument that names the tensor."""
        raw = request.raw_input_contents
        if raw and len(raw) != len(request.inputs):
            refuse("raw_input_contents", f"{len(raw)} entries for {len(request.inputs)} inputs; send one for each, or none")
        elements: dict[str, Sequence[Element]] = {}
        for number, tensor in enumerate(request.inputs):
            name = input_name(tensor.name)
            if tensor.name not in INPUTS:
                refuse(name, f"there is no such input; there are {', '.join(INPUTS)}")
            if tensor.name in elements:
                refuse(name, "is given twice")
            elements[tensor.name] = _elements(name, tensor, raw[number] if raw else None)
        return cls(elements)

    def has(self, name: str) -> bool:
        """Return whether the input was sent."""
        return name in self.elements

    def text(self, name: str) -> str | None:
        """Return the one element of a BYTES tensor as text; None if it was not sent."""
        if name not in self.elements:
            return None
        (element,) = self.elements[name]
        assert isinstance(element, bytes)
        try:
            return element.decode()
        except UnicodeDecodeError as error:
            refuse(input_name(name), f"is not UTF-8: {error}")

    def flag(self, name: str) -> bool | None:
        """Return the one element of a BOOL tensor; None if it was not sent."""
        return bool(self.elements[name][0]) if name in self.elements else None


def input_name(name: str) -> str:
    """Return the name of an input in error messages."""
    return f'inputs["{name[:100]}"]'


def _elements(name: str, tensor: pb.ModelInferRequest.InferInputTensor, raw: bytes | None) -> Sequence[Element]:
    declared = INPUTS[tensor.name]
    if tensor.datatype not in declared.datatypes:
        refuse(name, f"datatype is {tensor.datatype[:20]!r}, expected {' or '.join(declared.datatypes)}")
    if tensor.parameters:
        refuse(name, f"parameter {min(tensor.parameters)[:100]!r}: shared memory is not served here; send the contents")
    elements = _contents(name, tensor) if raw is None else _unpacked(name, tensor, raw)
    _check_shape(name, declared, tuple(tensor.shape), len(elements))
    return elements


def _contents(name: str, tensor: pb.ModelInferRequest.InferInputTensor) -> Sequence[Element]:
    """Return the elements of the field that belongs to the datatype. Elements in another field are an error, since they would be
    lost silently."""
    field = _FORMATS[tensor.datatype][1]
    other = [descriptor.name for descriptor, _ in tensor.contents.ListFields() if descriptor.name != field]
    if other:
        refuse(name, f"its elements are in contents.{other[0]}; those of {tensor.datatype} belong into contents.{field}")
    return list(getattr(tensor.contents, field))


def _unpacked(name: str, tensor: pb.ModelInferRequest.InferInputTensor, raw: bytes) -> Sequence[Element]:
    if tensor.HasField("contents"):
        refuse(name, "has contents, and raw_input_contents too; send one of them")
    letter = _FORMATS[tensor.datatype][0]
    if not letter:
        return _unpacked_bytes(name, raw)
    size = struct.calcsize(letter)
    if len(raw) % size:
        refuse(name, f"{len(raw)} bytes of raw contents are no whole number of {tensor.datatype} elements")
    return struct.unpack(f"<{len(raw) // size}{letter}", raw)


def _unpacked_bytes(name: str, raw: bytes) -> list[Element]:
    elements: list[Element] = []
    at = 0
    while at < len(raw):
        if at + _LENGTH.size > len(raw):
            refuse(name, f"raw contents end within the length of element {len(elements)}")
        (length,) = _LENGTH.unpack_from(raw, at)
        at += _LENGTH.size
        if at + length > len(raw):
            refuse(name, f"raw contents end within element {len(elements)}: it has {length} bytes, {len(raw) - at} are there")
        elements.append(raw[at : at + length])
        at += length
    return elements


def _check_shape(name: str, declared: Tensor, shape: tuple[int, ...], num_elements: int) -> None:
    """Check the shape, which may have more dimensions than declared, all of size 1: a batch of one."""
    shown = list(shape[:8])
    if not shape or min(shape) < 0:
        refuse(name, f"shape is {shown}, expected {list(declared.shape)}")
    if len(shape) > MAX_DIMENSIONS:
        refuse(name, f"has {len(shape)} dimensions, {MAX_DIMENSIONS} are allowed")
    if math.prod(shape) != num_elements:
        refuse(name, f"shape {shown} does not fit {num_elements} elements")
    if declared.shape == (1,) and num_elements != 1:
        refuse(name, f"shape is {shown}, expected [1]: a request is one prompt")
    if declared.shape == (-1,) and shape[-1] != num_elements:
        refuse(name, f"shape is {shown}, expected [n] or [1, n]: a request is one prompt")


def add_output(response: pb.ModelInferResponse, name: str, elements: Sequence[Element]) -> None:
    """Append one output with one dimension, as raw contents."""
    datatype = OUTPUTS[name].datatype
    response.outputs.add(name=name, datatype=datatype, shape=[len(elements)])
    letter = _FORMATS[datatype][0]
    if letter:
        raw = struct.pack(f"<{len(elements)}{letter}", *elements)
    else:
        raw = b"".join(_LENGTH.pack(len(element)) + element for element in elements if isinstance(element, bytes))
    response.raw_output_contents.append(raw)


# Metadata of the server and of its models.

EXTENSIONS = ("parameters", "model_configuration")
_DATA_TYPES = {"BYTES": config_pb.TYPE_STRING}  # the other names are the same


def server() -> pb.ServerMetadataResponse:
    """Return the name and version of this package."""
    return pb.ServerMetadataResponse(name=PLATFORM, version=package_version(), extensions=EXTENSIONS)


def model(name: str) -> pb.ModelMetadataResponse:
    """Return all tensors of a model."""
    return pb.ModelMetadataResponse(
        name=name,
        versions=[VERSION],
        platform=PLATFORM,
        inputs=[_metadata(tensor) for tensor in INPUTS.values()],
        outputs=[_metadata(tensor) for tensor in OUTPUTS.values()],
    )


def config(name: str) -> config_pb.ModelConfig:
    """Return the same as `model`, in the form that Triton's tools read."""
    return config_pb.ModelConfig(
        name=name,
        platform=PLATFORM,
        backend=PLATFORM,
        input=[
            config_pb.ModelInput(name=tensor.name, data_type=_data_type(tensor), dims=tensor.shape, optional=True)
            for tensor in INPUTS.values()
        ],
        output=[
            config_pb.ModelOutput(name=tensor.name, data_type=_data_type(tensor), dims=tensor.shape)
            for tensor in OUTPUTS.values()
        ],
        model_transaction_policy=config_pb.ModelTransactionPolicy(decoupled=True),
    )


def _metadata(tensor: Tensor) -> pb.ModelMetadataResponse.TensorMetadata:
    return pb.ModelMetadataResponse.TensorMetadata(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)


def _data_type(tensor: Tensor) -> config_pb.DataType.ValueType:
    return _DATA_TYPES.get(tensor.datatype) or config_pb.DataType.Value(f"TYPE_{tensor.datatype}")
