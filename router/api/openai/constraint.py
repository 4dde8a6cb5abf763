"""What the output must be: OpenAI's `response_format`, and vLLM's `structured_outputs` and older `guided_*`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import NamedTuple

from pdmesh.text.grammar import MAX_BYTES
from pdmesh.v1 import common_pb2
from router.api.openai.fields import Fields, as_text
from router.api.validation import refuse

JSON_OBJECT = '{"type":"object"}'


class Wanted(NamedTuple):
    """A constraint and the field that asked for it."""

    param: str
    constraint: common_pb2.Constraint


Reader = Callable[[Fields, str], common_pb2.Constraint]


def read_constraint(fields: Fields) -> Wanted | None:
    """The one that is asked for; None without. Raises InvalidArgument, also for two."""
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
        named.flag("strict")  # the schema is kept to in any case
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
    """A schema as an object, or as its text."""
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
