"""Bodies of HTTP requests and answers as types: pydantic checks them, and every error names the field as the client wrote it.

A request's body is a subclass of `Body`. A field that is not declared is refused. A field may also be declared `Ignored` (a hint
that changes no output) or `Unsupported` (refused, except with a value that asks for nothing); OpenAPI (`openapi.py`) and the
tables of docs/ show all three. A body of an answer is a subclass of `AnswerBody`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Annotated, Any, NoReturn, TypeVar, cast

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    JsonValue,
    ValidationError,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, ErrorDetails, PydanticCustomError, core_schema

from pdmesh.sampling_params import LEAST_TOP_P, MIN_TEMPERATURE, NUMBERS, PARAMETERS, Kind
from pdmesh.v1 import common_pb2
from router.api.http.fields import MAX_SHOWN_CHARS, MAX_UINT32, JsonObject, UnknownName, shown
from router.api.validation import refuse

MARK = "x-pdmesh"
"""Key of a field's JSON schema: "ignored" or "unsupported"."""


# A type is built when the first message needs it, not when a router starts.
MODEL_CONFIG = ConfigDict(
    extra="forbid", strict=True, frozen=True, allow_inf_nan=False, use_attribute_docstrings=True, defer_build=True
)


class Body(BaseModel):
    """A JSON object of a request. Null is as good as absent for every field that may be absent."""

    model_config = MODEL_CONFIG

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, values: object) -> object:
        if not isinstance(values, dict):
            return values
        if None in values.values():
            values = {name: value for name, value in values.items() if value is not None}
        return values if len(values) <= len(cls.__pydantic_fields__) else _few(cls, values)


def _few(kind: type[Body], given: dict[Any, object]) -> dict[Any, object]:
    """Return the fields that are known and one that is not: each unknown one would become an error, of which one is shown."""
    known = {field.alias or name for name, field in kind.__pydantic_fields__.items()}
    unknown = next(name for name in given if name not in known)
    return {name: value for name, value in given.items() if name in known or name is unknown}


class AnswerBody(BaseModel):
    """A JSON object of an answer."""

    model_config = MODEL_CONFIG


# What fields are made of.


@dataclass(frozen=True)
class Hint:
    """Mark a field that is accepted with any value and changes nothing. `why`: what it is, for documents."""

    why: str = ""

    def __get_pydantic_json_schema__(self, core: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return {**handler(core), MARK: "ignored", **({"description": self.why} if self.why else {})}


Ignored = Annotated[Any, Hint()]
"""Type of a field that is accepted with any value and changes nothing."""


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


class Only:
    """Mark a string that can have these values alone; `why`: the reason, which follows in errors."""

    def __init__(self, *values: str, why: str = "") -> None:
        self._values = values
        named = ", ".join(f'"{value}"' for value in values)
        self._words = f"only {named} is supported: {why}" if why else f"only {named} is supported"

    def __get_pydantic_core_schema__(self, source: type[Any], handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(self, core: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        made = handler(core)
        may_be_null = {"type": "null"} in made.get("anyOf", ())
        return {**made, "enum": [*self._values, *([None] if may_be_null else [])]}

    def _check(self, value: str | None) -> str | None:
        if value is not None and value not in self._values:
            raise ValueError(self._words)
        return value


class Refused:
    """Mark a field of a form that nothing may have: one of what is no other form. `refuse` raises ValueError, which says why."""

    def __init__(self, refuse: Callable[[Any], object]) -> None:
        self._refuse = refuse

    def __get_pydantic_core_schema__(self, source: type[Any], handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._refuse, handler(source))

    def __get_pydantic_json_schema__(self, core: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return {"not": {}}


def missing(advice: str) -> PydanticCustomError:
    """Return the error of a field that some other field makes necessary, for a validator of that field to raise."""
    return PydanticCustomError("missing", "is missing; {advice}", {"advice": advice})


def at_most(high: int, what: str = "entries") -> BeforeValidator:
    """Return a check of the length of an array or object that comes before any of its entries is looked at."""

    def check(values: object) -> object:
        if isinstance(values, list | dict) and len(values) > high:
            raise ValueError(f"{len(values)} {what} are more than {high}")
        return values

    return BeforeValidator(check)


def valid_unicode(text: str) -> str:
    """Return the text. Raises ValueError where it cannot be encoded."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("is not valid Unicode (it holds half of a surrogate pair)") from None
    return text


Text = Annotated[str, AfterValidator(valid_unicode)]
"""Type of a string that is valid Unicode: JSON can hold half of a surrogate pair."""
Count = Annotated[int, Field(ge=0, le=MAX_UINT32)]
"""Type of an unsigned number of 32 bits."""
FIRST_ERROR = Field(fail_fast=True)
"""Metadata of an array: its first wrong entry is the only one of which an error is made."""
Ids = Annotated[list[Count], FIRST_ERROR]
"""Type of a list of token ids."""


# From a body to an object of its type, or to an error that names the field.

B = TypeVar("B", bound=Body)
Path = tuple[int | str, ...]


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
    if error["type"] in ("extra_forbidden", "string_unicode"):  # the latter: a name that is not valid Unicode
        raise UnknownName(param, f"{param}: is not known here; leave it out")
    refuse(param, _words(error))


def _path(values: object, error: ErrorDetails) -> Path:
    """Return where the error lies in what was sent: pydantic's own path also names the alternatives of unions."""
    path: list[int | str] = []
    steps = [*error["loc"], *_further_steps(error)]
    for number, step in enumerate(steps):
        if isinstance(values, dict) and step in values:
            values = values[step]
        elif isinstance(values, list) and step in range(len(values)):
            values = values[int(step)]
        elif error["type"] not in _OF_ABSENT or number < len(steps) - 1:
            continue
        path.append(step)
    return tuple(path)


_TAGS = ("union_tag_invalid", "union_tag_not_found")
_OF_ABSENT = ("missing", "string_unicode", *_TAGS)


def _further_steps(error: ErrorDetails) -> list[str]:
    """Return what pydantic leaves out of a path: the field that tells alternatives apart, or the name that cannot be read."""
    if error["type"] in _TAGS:
        return [error["ctx"]["discriminator"].strip("'")]
    return [str(error["input"])] if error["type"] == "string_unicode" else []


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


def _number(value: object, _: dict[str, Any]) -> str:
    is_huge = isinstance(value, int) and not isinstance(value, bool)
    return "is not a finite number" if is_huge else _kind("a number")(value, _)


def _tag(value: object, context: dict[str, Any]) -> str:
    name = context["discriminator"].strip("'")
    tag = value.get(name) if isinstance(value, dict) else None
    return "is missing" if tag is None else f"{shown(tag)} is none of {context.get('expected_tags', 'the known ones')}"


_WORDS: dict[str, Callable[[object, dict[str, Any]], str]] = {
    "missing": lambda _, context: f"is missing; {context['advice']}" if "advice" in context else "is missing",
    "string_type": _kind("a string"),
    "string_too_short": lambda _, __: "is empty; send at least one character",
    "string_too_long": lambda value, context: f"has {len(str(value))} characters; {context['max_length']} are allowed",
    "too_short": lambda _, __: "there are none; send at least one",
    "too_long": lambda _, context: f"has more than {context['max_length']} entries",
    "int_type": _kind("an integer"),
    "int_from_float": _kind("an integer"),
    "float_type": _number,
    "finite_number": lambda _, __: "is not a finite number",
    "bool_type": lambda value, _: f"{shown(value)} is neither true nor false",
    "list_type": _kind("an array"),
    "dict_type": _kind("an object"),
    "model_type": _kind("an object"),
    "model_attributes_type": _kind("an object"),
    "literal_error": lambda value, context: f"{shown(value)} is none of {context['expected']}",
    "union_tag_invalid": _tag,
    "union_tag_not_found": _tag,
    "greater_than_equal": _bound("at least", "ge"),
    "greater_than": _bound("more than", "gt"),
    "less_than_equal": _bound("at most", "le"),
    "less_than": _bound("less than", "lt"),
    "value_error": lambda _, context: str(context["error"]),
}


# How tokens are drawn: what the bodies of OpenAI's endpoints share.


class DrawnBody(Body):
    """How tokens are drawn. The ranges are those of pdmesh/sampling_params.py."""

    temperature: float | None = None
    """0 is greedy. Left out, this and the following ones are what the model's generation_config.json says, or change nothing."""
    top_p: float | None = None
    """Of the likeliest tokens so many stay that their probabilities add up to this; 0 leaves the likeliest one."""
    top_k: Annotated[int, Field(ge=-1, le=MAX_UINT32)] | None = None
    """The number of likeliest tokens that stay; 0 and -1 are all."""
    min_p: float | None = None
    """Tokens stay that have this share of the likeliest one's probability."""
    repetition_penalty: float | None = None
    """Divides positive logits of the tokens of prompt and output, and multiplies negative ones; 1 is none."""
    presence_penalty: float | None = None
    """Is subtracted from the logits of tokens that the output contains."""
    frequency_penalty: float | None = None
    """Is subtracted from the logit of a token as many times as the output contains it."""
    seed: Annotated[int, Field(ge=-(2**63), le=2**64 - 1)] | None = None
    """The same seed gives the same tokens. Left out, it is drawn, and the answer names it."""

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """Show the ranges that the router serves."""
        made = handler.resolve_ref_schema(handler(core))
        for parameter in PARAMETERS:
            served = parameter.rules.served or parameter.rules.computed
            field = made.get("properties", {}).get(parameter.name, {})
            if served is not None and parameter.kind is Kind.NUMBER:
                bounds = {"minimum": 0.0 if parameter.rules.zero else served.low, "maximum": served.high}
                field |= {name: bound for name, bound in bounds.items() if math.isfinite(bound)}
        return made


def drawn(asked: DrawnBody) -> common_pb2.SamplingParams:
    """Return these parameters. The router checks ranges; a value that does not fit the wire has been refused."""
    sampling = common_pb2.SamplingParams()
    for parameter in NUMBERS:
        number = getattr(asked, parameter.name)
        if number is not None:
            setattr(sampling, parameter.name, number)
    if 0 < sampling.temperature < MIN_TEMPERATURE:
        sampling.temperature = 0  # OpenAI's range has no gap between greedy and the lowest temperature that can be computed
    if sampling.HasField("top_p") and sampling.top_p == 0:
        sampling.top_p = LEAST_TOP_P  # the likeliest token always stays
    if asked.top_k is not None:
        sampling.top_k = max(0, asked.top_k)
    if asked.seed is not None:
        sampling.seed = asked.seed % 2**64
    return sampling
