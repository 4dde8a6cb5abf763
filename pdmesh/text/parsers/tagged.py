"""Arguments as text between tags, which their schema makes JSON: a string is taken as it stands, anything else is read."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from pdmesh.text.parsers.json_text import NotJson, loaded
from pdmesh.text.parsers.machine import Schemas, expect_mark, name_until
from pdmesh.text.parsers.reader import Reader, Step

MAX_REFERENCES = 8


class Tags(NamedTuple):
    """`<parameter=KEY>VALUE</parameter>`: before a key, behind it, before its value if that has a tag of its own, behind it.
    `has_breaks`: a line break at either end of a value belongs to the tags."""

    key: str
    key_end: str
    value: str
    value_end: str
    has_breaks: bool = False


def arguments(reader: Reader, tags: Tags, schema: Mapping[str, Any], *ends: str) -> Step[None]:
    """Read the arguments of the call that is open, up to one of its end tags, which is read. Raises NotJson."""
    separator = "{"
    while (yield from expect_mark(reader, tags.key, *ends)) == tags.key:
        key, _ = yield from name_until(reader, tags.key_end)
        key = key.strip("\"'")
        if tags.value:
            yield from expect_mark(reader, tags.value)
        reader.arguments(f"{separator}{json.dumps(key, ensure_ascii=False)}: ")
        separator = ", "
        yield from _value(reader, tags, schema_of(schema, key))
    reader.arguments("{}" if separator == "{" else "}")
    reader.close_call()


def schema_of(schema: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Return the schema of a property; an empty one where it is not described. Pure."""
    properties = schema.get("properties")
    found = properties.get(key) if isinstance(properties, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def parameters(schemas: Schemas, name: str) -> Mapping[str, Any]:
    """Return the schema of a tool's parameters; an empty one of a tool that is not described. Pure."""
    return resolved(schemas.get(name, {}))


def _value(reader: Reader, tags: Tags, schema: Mapping[str, Any]) -> Step[None]:
    if schema.get("type") == "string":
        reader.arguments('"')
        yield from _text(reader, tags, lambda piece: reader.arguments(json.dumps(piece, ensure_ascii=False)[1:-1]))
        reader.arguments('"')
        return
    pieces: list[str] = []
    yield from _text(reader, tags, pieces.append)
    reader.arguments(as_json("".join(pieces), schema))


def _text(reader: Reader, tags: Tags, give: Callable[[str], None]) -> Step[None]:
    lines = _Lines(give)
    if not (yield from reader.until((tags.value_end,), lines if tags.has_breaks else give)):
        lines.end()
        raise NotJson(f"{tags.value_end} is missing")


def as_json(text: str, schema: Mapping[str, Any]) -> str:
    """Return JSON: the text itself if it is any that the schema may mean, else a string of it. Pure."""
    options = options_of(schema)
    if text in (options or ()):
        return json.dumps(text, ensure_ascii=False)
    try:
        found = loaded(text)
    except (ValueError, RecursionError):
        lowered = {"True": "true", "False": "false", "None": "null"}.get(text.strip())
        return lowered or json.dumps(text, ensure_ascii=False)
    if options is not None and found in options:
        return text.strip()
    kinds = kinds_of(schema)
    is_text = isinstance(found, str) and not is_told(schema)
    if kinds is not None and "string" in kinds:
        is_text = not isinstance(found, str) and kinds.isdisjoint(_KINDS[type(found)])
    return json.dumps(text, ensure_ascii=False) if is_text else text.strip()


def options_of(schema: Mapping[str, Any]) -> Sequence[Any] | None:
    """Return the values that a schema allows by name; None where it names none. Pure."""
    if "const" in schema:
        return [schema["const"]]
    return schema["enum"] if isinstance(schema.get("enum"), list) else None


_KINDS: Mapping[type, frozenset[str]] = {
    bool: frozenset({"boolean"}),
    int: frozenset({"integer", "number"}),
    float: frozenset({"number", "integer"}),  # 5.0 is one, too
    dict: frozenset({"object"}),
    list: frozenset({"array"}),
    type(None): frozenset({"null"}),
    str: frozenset({"string"}),
}


def kinds_of(schema: Mapping[str, Any]) -> frozenset[str] | None:
    """Return the types of JSON that a schema may allow; None where that cannot be told at a glance. Pure."""
    if isinstance(said := schema.get("type"), str):
        return frozenset({said})
    if isinstance(said, list):
        return frozenset(each for each in said if isinstance(each, str))
    for several in ("anyOf", "oneOf"):
        if isinstance(found := schema.get(several), list):
            each = [kinds_of(one) if isinstance(one, Mapping) else None for one in found]
            return None if None in each else frozenset().union(*filter(None, each))
    return None


def resolved(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a schema whose members are named at its top: where it is a reference to one of its definitions, that. Pure."""
    for _ in range(MAX_REFERENCES):
        reference = schema.get("$ref")
        _, _, path = reference.partition("#/") if isinstance(reference, str) else ("", "", "")
        where, _, name = path.partition("/")
        definitions = schema.get(where) if where in ("$defs", "definitions") else None
        found = definitions.get(name) if isinstance(definitions, Mapping) else None
        if not isinstance(found, Mapping):
            return schema
        schema = {where: definitions, **found, **{key: each for key, each in schema.items() if key != "$ref"}}
    return schema


def is_told(schema: Mapping[str, Any]) -> bool:
    """Return whether a schema may say which type a value has. Pure."""
    return not {"type", "anyOf", "oneOf", "allOf", "$ref"}.isdisjoint(schema)


class _Lines:
    """Give text away without the line break at either end, which belongs to the tags."""

    def __init__(self, give: Callable[[str], None]) -> None:
        self._give = give
        self._has_begun = False
        self._held = ""

    def __call__(self, text: str) -> None:
        if not self._has_begun:
            self._has_begun = True
            text = text.removeprefix("\n")
        whole = self._held + text
        self._held = "\n" if whole.endswith("\n") else ""
        if given := whole[: len(whole) - len(self._held)]:
            self._give(given)

    def end(self) -> None:
        """No tag follows: the line break is the value's."""
        if self._held:
            self._give(self._held)
