"""Our descriptions of foreign protocols say the same as their owners' packages do, where those are installed.

Their generated modules hold a serialized description, which is read without importing them: they pin another protobuf, and
would register the same names.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from google.protobuf import descriptor_pb2
from google.protobuf.descriptor import FileDescriptor

from benchmarks.peers.environments import peers_folder
from pdmesh.third_party.kserve import grpc_service_pb2, model_config_pb2
from pdmesh.third_party.vllm import smg_common_pb2, vllm_engine_pb2

File = descriptor_pb2.FileDescriptorProto
Message = descriptor_pb2.DescriptorProto
# environment of `make bench-clients`, module in it, our description
PAIRS = [
    ("tritonclient", "tritonclient/grpc/service_pb2.py", grpc_service_pb2.DESCRIPTOR),
    ("tritonclient", "tritonclient/grpc/model_config_pb2.py", model_config_pb2.DESCRIPTOR),
    ("smg", "smg_grpc_proto/generated/vllm_engine_pb2.py", vllm_engine_pb2.DESCRIPTOR),
    ("smg", "smg_grpc_proto/generated/common_pb2.py", smg_common_pb2.DESCRIPTOR),
]


def _theirs(environment: str, module: str) -> File:
    found = list((peers_folder() / environment).glob(f"lib/python*/site-packages/{module}"))
    if not found:
        pytest.skip(f"{environment} is not installed in the cache; `make bench-clients` installs it")
    return serialized_in(found[0])


def serialized_in(module: Path) -> File:
    """The argument of AddSerializedFile in a generated module."""
    for node in ast.walk(ast.parse(module.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "AddSerializedFile":
            argument = node.args[0]
            assert isinstance(argument, ast.Constant) and isinstance(argument.value, bytes)
            return File.FromString(argument.value)
    raise AssertionError(f"{module.name} holds no description")


def _messages(messages: Iterable[Message], prefix: str = "") -> Iterator[tuple[str, Message]]:
    for message in messages:
        yield f"{prefix}{message.name}", message
        yield from _messages(message.nested_type, f"{prefix}{message.name}.")


def _field(message: Message, field: descriptor_pb2.FieldDescriptorProto) -> tuple[object, ...]:
    oneof = message.oneof_decl[field.oneof_index].name if field.HasField("oneof_index") else ""
    type_name = field.type_name.removeprefix(".")
    return field.number, field.type, field.label, type_name, field.proto3_optional, oneof, field.options.packed


@pytest.mark.parametrize(("environment", "module", "ours"), PAIRS)
def test_messages_fields_and_methods(environment: str, module: str, ours: FileDescriptor) -> None:
    theirs, mine = _theirs(environment, module), File()
    ours.CopyToProto(mine)
    assert mine.package == theirs.package
    their_messages = dict(_messages(theirs.message_type))
    for name, message in _messages(mine.message_type):
        there = {field.name: _field(their_messages[name], field) for field in their_messages[name].field}
        here = {field.name: _field(message, field) for field in message.field}
        assert here.items() <= there.items(), name
        if name.endswith("Request") or name in ("SamplingParams", "InferParameter", "InferTensorContents", "TokenizedInput"):
            assert here.keys() == there.keys(), f"{name}: what a client may send has to be seen"
        assert message.options.map_entry == their_messages[name].options.map_entry
    their_enums = {enum.name: {value.name: value.number for value in enum.value} for enum in theirs.enum_type}
    for enum in mine.enum_type:
        assert {value.name: value.number for value in enum.value} == their_enums[enum.name]
    for service in mine.service:
        (other,) = (candidate for candidate in theirs.service if candidate.name == service.name)
        their_methods = {method.name: _method(method) for method in other.method}
        assert {method.name: _method(method) for method in service.method}.items() <= their_methods.items()


def _method(method: descriptor_pb2.MethodDescriptorProto) -> tuple[object, ...]:
    return method.input_type, method.output_type, method.client_streaming, method.server_streaming
