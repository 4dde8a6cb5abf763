"""Loads the `.proto` files as descriptors, with their comments, for the reference and the check of stability."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
    MethodDescriptorProto,
    ServiceDescriptorProto,
)
from grpc_tools import protoc

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "pdmesh.v1"
CLIENT_SERVICE = "Mesh"
# Numbers of fields in descriptor.proto: with indexes they make the path of a comment.
MESSAGE_TYPE, ENUM_TYPE, SERVICE, SYNTAX = 4, 5, 6, 12
FIELD, ONEOF, VALUE, METHOD = 2, 8, 2, 2
SCALARS = {number: name.removeprefix("TYPE_").lower() for name, number in FieldDescriptorProto.Type.items()}
Type = DescriptorProto | EnumDescriptorProto


@dataclass(frozen=True)
class Commented:
    """Hold a file with the comments of its parts, by path, as written."""

    file: FileDescriptorProto
    comments: dict[tuple[int, ...], str]


class Api:
    """Hold all of `pdmesh.v1`: services and types by name, comments by what they belong to ("Delta.text")."""

    def __init__(self, files: list[Commented]) -> None:
        self.files = files
        self.services: dict[str, ServiceDescriptorProto] = {}
        self.types: dict[str, Type] = {}
        self.comments: dict[str, str] = {}
        for commented in files:
            self._add(commented)

    def _add(self, commented: Commented) -> None:
        file, comments = commented.file, commented.comments
        for index, service in enumerate(file.service):
            self.services[service.name] = service
            self._note(service.name, comments.get((SERVICE, index)))
            for number, method in enumerate(service.method):
                self._note(f"{service.name}.{method.name}", comments.get((SERVICE, index, METHOD, number)))
        for index, message in enumerate(file.message_type):
            if message.nested_type or message.enum_type:
                raise SystemExit(
                    f"{file.name}: {message.name} holds nested types; neither the reference nor the check covers them"
                )
            self.types[message.name] = message
            self._note(message.name, comments.get((MESSAGE_TYPE, index)))
            for number, field in enumerate(message.field):
                self._note(f"{message.name}.{field.name}", comments.get((MESSAGE_TYPE, index, FIELD, number)))
        for index, enum in enumerate(file.enum_type):
            self.types[enum.name] = enum
            self._note(enum.name, comments.get((ENUM_TYPE, index)))
            for number, value in enumerate(enum.value):
                self._note(f"{enum.name}.{value.name}", comments.get((ENUM_TYPE, index, VALUE, number)))

    def _note(self, name: str, comment: str | None) -> None:
        self.comments[name] = comment or ""

    def reachable(self, services: list[str]) -> list[str]:
        """Return the names of the types that calls of `services` send, in reading order."""
        found: dict[str, None] = {}
        for name in services:
            for method in self.services[name].method:
                self._reach(method.input_type, found)
                self._reach(method.output_type, found)
        return list(found)

    def _reach(self, full_name: str, found: dict[str, None]) -> None:
        name = short(full_name)
        if name in found:
            return
        found[name] = None
        definition = self.types[name]
        if isinstance(definition, DescriptorProto):
            for field in definition.field:
                if field.type_name:
                    self._reach(field.type_name, found)


def load() -> Api:
    """Compile `protos/pdmesh/v1/*.proto` with their comments."""
    protos = ROOT / "protos"
    sources = sorted(str(path.relative_to(protos)) for path in (protos / "pdmesh/v1").glob("*.proto"))
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "descriptors"
        status = protoc.main(["protoc", f"-I{protos}", "--include_source_info", f"--descriptor_set_out={out}", *sources])
        if status != 0:
            raise SystemExit(f"protoc failed with status {status}")
        files = FileDescriptorSet.FromString(out.read_bytes()).file
    return Api([Commented(file, dict(_comments(file))) for file in files])


def _comments(file: FileDescriptorProto) -> Iterator[tuple[tuple[int, ...], str]]:
    for location in file.source_code_info.location:
        if location.leading_comments:
            yield tuple(location.path), location.leading_comments


def short(full_name: str) -> str:
    """Return the name within the package. Raises SystemExit for a type of another package."""
    name = full_name.removeprefix(f".{PACKAGE}.")
    if "." in name:
        raise SystemExit(f"{full_name} is outside {PACKAGE}; neither the reference nor the check of stability covers it")
    return name


def type_name(field: FieldDescriptorProto) -> str:
    """Return the type, such as "uint32" or "TokenIds"."""
    return short(field.type_name) if field.type_name else SCALARS[field.type]


def oneof_name(message: DescriptorProto, field: FieldDescriptorProto) -> str | None:
    """Return the oneof that the field is a member of; None for others (that of `optional` does not count)."""
    if not field.HasField("oneof_index") or field.proto3_optional:
        return None
    return message.oneof_decl[field.oneof_index].name


def cardinality(message: DescriptorProto, field: FieldDescriptorProto) -> str:
    """Return "repeated", "optional" (absence can be told from zero), "oneof kind", or "" for a plain field."""
    if field.label == FieldDescriptorProto.LABEL_REPEATED:
        return "repeated"
    if field.proto3_optional:
        return "optional"
    name = oneof_name(message, field)
    return "" if name is None else f"oneof {name}"


def signature(method: MethodDescriptorProto) -> tuple[str, str]:
    """Return ("GenerateRequest", "stream GenerateResponse")."""
    sent, received = short(method.input_type), short(method.output_type)
    return ("stream " * method.client_streaming + sent, "stream " * method.server_streaming + received)
