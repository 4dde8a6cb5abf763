"""Writes the reference of `pdmesh.v1`, field by field, from the `.proto` files and their comments.

`python -m tools.protos.reference` writes docs/api.md; with `--check` it compares and exits 1 when the page is stale.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    MethodDescriptorProto,
)

from tools.protos import descriptors
from tools.protos.descriptors import CLIENT_SERVICE, PACKAGE, SYNTAX, Api

PAGE = descriptors.ROOT / "docs/api.md"
INTRODUCTION = f"""\
# API reference: `{PACKAGE}`

Generated from `protos/pdmesh/v1/*.proto` by `make stubs`: change the comments there, not this page. How to call it from a
program of any language, what errors mean and what may change: [grpc.md](grpc.md).

How to read the tables: a field of no *kind* is never absent: the reader gets the default of what was not
sent. An *optional* field, a message and a member of a *oneof* can be told to be absent; of a *oneof* at most one is set.
*repeated* is a list in order. A server ignores fields that it does not know, and so has a client to.
"""
DEFAULTS = {"string": '`""`', "bytes": "empty", "bool": "`false`", "double": "`0`", "float": "`0`"}


def page(api: Api) -> str:
    """Return the whole page."""
    client = api.reachable([CLIENT_SERVICE])
    internal = [name for name in api.services if name != CLIENT_SERVICE]
    rest = sorted(set(api.types) - set(client), key=list(api.types).index)
    return "\n".join(
        [
            INTRODUCTION,
            *_contents(api, client, internal, rest),
            "## Client API\n",
            f"Served by every router. `{PACKAGE}.{CLIENT_SERVICE}` and all types under this heading are stable.\n",
            *_service(api, CLIENT_SERVICE),
            *_types(api, client),
            "## Between the services of a mesh\n",
            "No client needs these: they change together with the mesh. Workers serve them to routers and to each other.\n",
            *(line for name in internal for line in _service(api, name)),
            *_types(api, rest),
            "## The wire of the transfer\n",
            f"```text\n{_file_comment(api, 'transfer.proto')}\n```",
            "",
        ]
    )


def _contents(api: Api, client: list[str], internal: list[str], rest: list[str]) -> Iterator[str]:
    yield "## Contents\n"
    yield f"- Calls of clients: {_methods_of(api, CLIENT_SERVICE)}"
    yield f"- Their types: {_links(client)}"
    for name in internal:
        yield f"- {_link(name)}: {_methods_of(api, name)}"
    yield f"- Types between services: {_links(rest)}\n"


def _methods_of(api: Api, service: str) -> str:
    return " · ".join(f"[{method.name}](#{_anchor(f'{service}.{method.name}')})" for method in api.services[service].method)


def _service(api: Api, name: str) -> Iterator[str]:
    yield f"### {name}\n\n{_text(api, name)}\n"
    for method in api.services[name].method:
        yield f"#### {name}.{method.name}\n\n`/{PACKAGE}.{name}/{method.name}` · {_shape(method)}\n"
        yield f"{_text(api, f'{name}.{method.name}')}\n"


def _shape(method: MethodDescriptorProto) -> str:
    sent, received = (_stream_link(part) for part in descriptors.signature(method))
    return f"takes {sent}, returns {received}"


def _stream_link(part: str) -> str:
    name = part.removeprefix("stream ")
    return f"a stream of {_link(name)}" if part != name else _link(name)


def _types(api: Api, names: Iterable[str]) -> Iterator[str]:
    for name in names:
        definition = api.types[name]
        yield f"### {name}\n\n{_text(api, name)}\n"
        yield from _message(api, definition) if isinstance(definition, DescriptorProto) else _enum(api, definition)


def _message(api: Api, message: DescriptorProto) -> Iterator[str]:
    if not message.field:
        return
    yield "| field | type | kind | default | meaning |\n| --- | --- | --- | --- | --- |"
    for field in message.field:
        kind = descriptors.cardinality(message, field)
        shown = kind.replace("oneof ", "oneof `") + "`" if kind.startswith("oneof") else kind
        row = (_numbered(field.name, field.number), _type(field), shown, _default(api, field, kind))
        yield f"| {' | '.join(row)} | {_text(api, f'{message.name}.{field.name}')} |"
    yield ""


def _numbered(name: str, number: int) -> str:
    """Return the name with spaces that do not break: a narrow column would separate the parts."""
    return f"`{name}`\N{NO-BREAK SPACE}=\N{NO-BREAK SPACE}{number}"


def _type(field: FieldDescriptorProto) -> str:
    name = descriptors.type_name(field)
    return _link(name) if field.type_name else f"`{name}`"


def _default(api: Api, field: FieldDescriptorProto, kind: str) -> str:
    """Return what a reader gets of a field that was not sent."""
    if kind == "repeated":
        return "empty"
    if kind or field.type == FieldDescriptorProto.TYPE_MESSAGE:
        return "absent"
    if field.type == FieldDescriptorProto.TYPE_ENUM:
        enum = api.types[descriptors.type_name(field)]
        return f"`{enum.value[0].name}`" if isinstance(enum, EnumDescriptorProto) else ""
    return DEFAULTS.get(descriptors.type_name(field), "`0`")


def _enum(api: Api, enum: EnumDescriptorProto) -> Iterator[str]:
    yield "| value | meaning |\n| --- | --- |"
    for value in enum.value:
        yield f"| {_numbered(value.name, value.number)} | {_text(api, f'{enum.name}.{value.name}')} |"
    yield ""


def _text(api: Api, name: str) -> str:
    """Return the comment on one line, as Markdown for a table."""
    words = " ".join(api.comments[name].split())
    return words.replace("|", "\\|").replace("<", "&lt;")


def _file_comment(api: Api, name: str) -> str:
    (commented,) = (commented for commented in api.files if commented.file.name.endswith("/" + name))
    return "\n".join(line.removeprefix(" ") for line in commented.comments[(SYNTAX,)].rstrip().split("\n"))


def _links(names: Iterable[str]) -> str:
    return ", ".join(_link(name) for name in names)


def _link(name: str) -> str:
    return f"[{name}](#{_anchor(name)})"


def _anchor(heading: str) -> str:
    """Return the anchor that a forge makes from a heading."""
    return heading.lower().replace(".", "").replace(" ", "-")


def main() -> None:
    """Write the page, or with `--check` compare."""
    fresh = page(descriptors.load())
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(fresh, encoding="utf-8")
    elif not PAGE.exists() or PAGE.read_text(encoding="utf-8") != fresh:
        raise SystemExit(f"{PAGE.name} is stale, run `make stubs`")
    else:
        print("the reference is fresh")


if __name__ == "__main__":
    main()
