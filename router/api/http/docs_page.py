"""A page of an OpenAPI document: its endpoints, and the fields of their bodies. It needs no script and no other host."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from html import escape
from typing import Any

from router.api.http.types import MARK

POLICY = "default-src 'none'; style-src 'unsafe-inline'"
"""The page's Content-Security-Policy."""

_STYLE = """
:root { color-scheme: light dark }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem }
table { border-collapse: collapse; width: 100%; margin: .5rem 0 1.5rem }
th, td { border-bottom: 1px solid #8884; padding: .25rem .6rem; text-align: left; vertical-align: top }
code { font: 13px ui-monospace, monospace }
.method { font-weight: 600 }
.unsupported, .ignored { opacity: .7 }
"""


@dataclass(frozen=True)
class Row:
    """Hold one field of a body. `mark`: "", "ignored" or "unsupported"."""

    name: str
    type: str
    mark: str
    is_required: bool
    description: str
    harmless: tuple[object, ...] = ()


def rows(schema: Mapping[str, Any], schemas: Mapping[str, Any]) -> list[Row]:
    """Return the fields of a body by their schema: supported ones first, then ignored ones, then those that are refused."""
    found: dict[str, Row] = {}
    for each in _objects(schema, schemas):
        required = each.get("required", ())
        for name, value in each.get("properties", {}).items():
            found.setdefault(name, _row(name, value, schemas, is_required=name in required))
    return sorted(found.values(), key=lambda row: ("", "ignored", "unsupported").index(row.mark))


def _objects(schema: Mapping[str, Any], schemas: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the object that a schema stands for, or each of several."""
    if "$ref" in schema:
        yield from _objects(schemas[_name(schema)], schemas)
    for each in schema.get("anyOf", schema.get("oneOf", ())):
        yield from _objects(each, schemas)
    if "properties" in schema:
        yield schema


def _name(schema: Mapping[str, Any]) -> str:
    return str(schema["$ref"]).rpartition("/")[2]


def _short(name: str) -> str:
    """Return a type's name without the module that tells it from another of the same name."""
    return name.rpartition("__")[2]


def _row(name: str, schema: Mapping[str, Any], schemas: Mapping[str, Any], *, is_required: bool) -> Row:
    mark, harmless = schema.get(MARK, ""), tuple(value for value in schema.get("enum", ()) if value is not None)
    return Row(name, _type(schema) + _bounds(schema), mark, is_required, _description(schema, schemas), harmless)


def _description(schema: Mapping[str, Any], schemas: Mapping[str, Any]) -> str:
    """Return what a field's schema says of it; where it says nothing, what the one type that it names says of itself."""
    if "description" in schema:
        return str(schema["description"])
    named = list(_named(schema))
    return str(schemas[named[0]].get("description", "")) if len(named) == 1 else ""


def _type(schema: Mapping[str, Any]) -> str:
    """Return the type in words, such as "string or array of string"."""
    if "$ref" in schema:
        return _short(_name(schema))
    options = schema.get("anyOf") or schema.get("oneOf")
    if options:
        return " or ".join(dict.fromkeys(_type(each) + _bounds(each) for each in options if each.get("type") != "null"))
    if "const" in schema or "enum" in schema:
        return " or ".join(f'"{value}"' if isinstance(value, str) else str(value) for value in _values(schema))
    kind = schema.get("type", "any")
    if kind == "array" and schema.get("items"):
        return f"array of {_type(schema['items'])}"
    return " or ".join(kind) if isinstance(kind, list) else str(kind)


def _values(schema: Mapping[str, Any]) -> list[object]:
    return [schema["const"]] if "const" in schema else list(schema["enum"])


def _bounds(schema: Mapping[str, Any]) -> str:
    low, high = schema.get("minimum"), schema.get("maximum")
    if high is not None:
        return f", {_shown(low or 0)} to {_shown(high)}"
    return "" if low is None else f", at least {_shown(low)}"


def _shown(number: float) -> str:
    return str(number) if isinstance(number, int) else f"{number:g}"


# The page.


def page(document: Mapping[str, Any]) -> str:
    """Return the HTML page of an OpenAPI document."""
    parts = [f"<h1>{escape(document['info']['title'])} {escape(document['info']['version'])}</h1>"]
    parts.append('<p>Made from the types that check the requests: <a href="openapi.json">openapi.json</a> (OpenAPI 3.1).</p>')
    operations = [(path, method, each) for path, of in document["paths"].items() for method, each in of.items()]
    parts.append("<table><tr><th>endpoint<th></tr>")
    parts += [f'<tr><td><a href="#{each["operationId"]}">{_endpoint(path, method)}</a>' for path, method, each in operations]
    parts.append("</table>")
    schemas = document["components"]["schemas"]
    for path, method, each in operations:
        parts += _section(path, method, each, schemas)
    parts.append("<h2>Types</h2>")
    for name, schema in schemas.items():
        parts += [f'<h3 id="{escape(name)}">{escape(_short(name))}</h3>', _words(schema), _table(schema, schemas)]
    title = "<!doctype html><html lang=en><meta charset=utf-8><title>pdmesh API</title>"
    return f"{title}<meta name=viewport content='width=device-width'><style>{_STYLE}</style><body>{''.join(parts)}</body></html>"


def _endpoint(path: str, method: str) -> str:
    return f"<code><span class=method>{escape(method.upper())}</span> {escape(path)}</code>"


def _section(path: str, method: str, operation: Mapping[str, Any], schemas: Mapping[str, Any]) -> Iterator[str]:
    words = ". ".join(operation[name] for name in ("summary", "description") if name in operation)
    yield f'<h2 id="{operation["operationId"]}">{_endpoint(path, method)}</h2><p>{escape(words)}</p>'
    yield _parameters(operation, "query")
    yield _parameters(operation, "header")
    contents = {"request": operation.get("requestBody", {})}
    contents |= {f"answer ({status})": each for status, each in operation["responses"].items()}
    for what, body in contents.items():
        for kind, content in body.get("content", {}).items():
            names = ", ".join(_links(content["schema"])) or escape(_type(content["schema"]))
            yield f"<p>{what}, <code>{escape(kind)}</code>: {names}</p>"
            if what == "request":
                yield _table(content["schema"], schemas)


def _links(schema: Mapping[str, Any]) -> Iterator[str]:
    """Yield a link to each type that a schema names, at any depth."""
    for name in _named(schema):
        yield f'<a href="#{escape(name)}">{escape(_short(name))}</a>'


def _named(schema: Mapping[str, Any]) -> Iterator[str]:
    """Yield the name of each type that a schema names, at any depth."""
    if "$ref" in schema:
        yield _name(schema)
    for each in (*schema.get("anyOf", ()), *schema.get("oneOf", ()), *([schema["items"]] if "items" in schema else ())):
        yield from _named(each)


def _words(schema: Mapping[str, Any]) -> str:
    return f"<p>{escape(schema.get('description', ''))}</p>"


def _parameters(operation: Mapping[str, Any], place: str) -> str:
    """Return the table of what counts in the query, or of the headers that do, one line for those that mean the same."""
    names: dict[str, list[str]] = {}
    for each in operation.get("parameters", ()):
        if each["in"] == place:
            names.setdefault(each["description"], []).append(f"<code>{escape(each['name'])}</code>")
    lines = "".join(f"<tr><td>{', '.join(alike)}<td>{escape(what)}</tr>" for what, alike in names.items())
    return f"<table><tr><th>{place}<th>meaning</tr>{lines}</table>" if lines else ""


def _table(schema: Mapping[str, Any], schemas: Mapping[str, Any]) -> str:
    lines = "".join(_line(row) for row in rows(schema, schemas))
    return f"<table><tr><th>field<th>type<th>meaning</tr>{lines}</table>" if lines else ""


def _line(row: Row) -> str:
    notes = {"ignored": "ignored", "unsupported": "refused"}.get(row.mark, "required" if row.is_required else "")
    if row.harmless and row.mark:
        notes += f", but for {' and '.join(repr(value) for value in row.harmless)}"
    said = "; ".join(filter(None, (notes, row.description)))
    return f'<tr class="{row.mark}"><td><code>{escape(row.name)}</code><td>{escape(row.type)}<td>{escape(said)}</tr>'
