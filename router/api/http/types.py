"""Bodies of HTTP requests as types: pydantic checks them, and every error names the field as the client wrote it.

A body is a subclass of `Body`. A field that is not declared is refused. A field may also be declared `Ignored` (a hint that
changes no output) or `unsupported` (refused, except with a value that asks for nothing); OpenAPI and the tables of docs/ show
all three.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Annotated, Any, NoReturn, TypeVar, cast

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    JsonValue,
    ValidationError,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, ErrorDetails, core_schema

from router.api.http.fields import MAX_SHOWN_CHARS, JsonObject, UnknownName, shown
from router.api.validation import refuse

MARK = "x-pdmesh"
"""Key of a field's JSON schema: "ignored" or "unsupported"."""

Ignored = Annotated[Any, Field(json_schema_extra={MARK: "ignored"})]
"""Type of a field that is accepted with any value and changes nothing."""


def _unicode(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("is not valid Unicode (it holds half of a surrogate pair)") from None
    return text


Text = Annotated[str, AfterValidator(_unicode)]
"""Type of a string that is valid Unicode: JSON can hold half of a surrogate pair."""

Path = tuple[int | str, ...]


class Body(BaseModel):
    """A JSON object of a request. Null is as good as absent for every field that may be absent."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, values: object) -> object:
        return {name: value for name, value in values.items() if value is not None} if isinstance(values, dict) else values


B = TypeVar("B", bound=Body)


class Unsupported:
    """Mark a field that is refused, except with null or a value of `harmless`, which ask for nothing. `words`: what the error
    says; `why`: the reason, for documents."""

    def __init__(self, *harmless: object, words: str = "is not supported; leave it out", why: str = "") -> None:
        self._harmless = harmless
        self._words = words
        self._why = why

    def __get_pydantic_core_schema__(self, source: type[Any], handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(self, core: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        values = cast("list[JsonValue]", [None, *self._harmless])
        return {**handler(core), MARK: "unsupported", "enum": values, **({"description": self._why} if self._why else {})}

    def _check(self, value: object) -> object:
        if value is not None and not any(type(value) is type(good) and value == good for good in self._harmless):
            raise ValueError(self._words)
        return value


def unsupported(*harmless: object) -> Any:
    """Return the type of a field that is refused, except with null or a value of `harmless`, which ask for nothing."""
    return Annotated[Any, Unsupported(*harmless)]


def checked(kind: type[B], values: JsonObject) -> B:
    """Return a request's body. Raises InvalidArgument that names the field; UnknownName for one that is not declared."""
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        _refuse(values, error.errors(include_url=False))


def _refuse(values: JsonObject, errors: Iterable[ErrorDetails]) -> NoReturn:
    """Refuse the field of the error that lies deepest: of the forms that a value may have, that is the one that was meant."""
    path, error = max(((_path(values, each), each) for each in errors), key=lambda found: len(found[0]))
    param = _spelled(path)
    if error["type"] == "extra_forbidden":
        raise UnknownName(param, f"{param}: is not known here; leave it out")
    refuse(param, _words(error))


def _path(values: object, error: ErrorDetails) -> Path:
    """Return where the error lies in what was sent: pydantic's own path also names the alternatives of unions."""
    path: list[int | str] = []
    for step in error["loc"]:
        if isinstance(values, dict) and step in values:
            values = values[step]
        elif isinstance(values, list) and step in range(len(values)):
            values = values[int(step)]
        elif error["type"] != "missing" or step != error["loc"][-1]:
            continue
        path.append(step)
    return tuple(path)


def _spelled(path: Path) -> str:
    text = "".join(f"[{step}]" if isinstance(step, int) else f".{step[:MAX_SHOWN_CHARS]}" for step in path)
    return text.removeprefix(".")


def _words(error: ErrorDetails) -> str:
    words = _WORDS.get(error["type"])
    return words(error["input"], error.get("ctx", {})) if words else error["msg"]


def _kind(name: str) -> Callable[[object, dict[str, Any]], str]:
    return lambda value, _: "is missing" if value is None else f"{shown(value)} is not {name}"


def _bound(relation: str, key: str) -> Callable[[object, dict[str, Any]], str]:
    return lambda value, context: f"{shown(value)} is not {relation} {context[key]}"


_WORDS: dict[str, Callable[[object, dict[str, Any]], str]] = {
    "missing": lambda _, __: "is missing",
    "string_type": _kind("a string"),
    "int_type": _kind("an integer"),
    "int_from_float": _kind("an integer"),
    "float_type": _kind("a number"),
    "finite_number": lambda _, __: "is not a finite number",
    "bool_type": lambda value, _: f"{shown(value)} is neither true nor false",
    "list_type": _kind("an array"),
    "dict_type": _kind("an object"),
    "model_type": _kind("an object"),
    "literal_error": lambda value, context: f"{shown(value)} is none of {context['expected']}",
    "greater_than_equal": _bound("at least", "ge"),
    "greater_than": _bound("more than", "gt"),
    "less_than_equal": _bound("at most", "le"),
    "less_than": _bound("less than", "lt"),
    "value_error": lambda _, context: str(context["error"]),
}
