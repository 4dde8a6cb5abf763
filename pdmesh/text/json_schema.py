"""Prepares JSON schemas for llguidance, which compiles some of them to something else than they say: such numbers are
refused, such classes of characters are rewritten."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable, Iterable, Iterator
from decimal import Decimal
from typing import NoReturn

from pdmesh.text.exact_json import MAX_DIGITS, LongNumber, dumps

# Numbers. llguidance keeps them as doubles, and integers as i64 made of these: a larger one would force or allow its neighbours,
# and -2^63 overflows its stack.

MAX_EXACT = 2**53
MAX_INT64 = 2**63 - 1
MAX_MULTIPLE, MAX_ROUND_MULTIPLE, MAX_ROUND_DIGITS = 100_000, 10**8, 1000
"""Bound multipleOf, whose remainders are compiled one by one (half a second for a prime number of this size): any number up to
the first; up to the second one with at most so many as its digits before zeros at the end."""

_VALUES = ("const", "enum")
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_NOT_READ = ("default", "examples", "title", "description")
_MAPS_OF_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")

Object = dict[str, object]


def prepared(source: str, schema: Object) -> str:
    """Return the text of `schema`, which was parsed from `source`, as llguidance reads it rightly; `schema` is changed.

    Raises ValueError that names the keyword: a number that would not be kept."""
    is_changed = False
    for inner in _schemas(schema):
        _check_numbers(inner)
        is_changed |= _rewrite_patterns(inner)
    return _dumped(schema) if is_changed else source


def _schemas(root: Object) -> Iterator[Object]:
    """Yield a schema and all within it, also below keywords that are not known here, to which a reference may lead. No recursion:
    schemas may be nested deep."""
    ahead: list[object] = [root]
    while ahead:
        value = ahead.pop()
        if isinstance(value, list):
            ahead += value
        elif isinstance(value, dict):
            yield value
            for key, each in value.items():
                if key in _MAPS_OF_SCHEMAS and isinstance(each, dict):
                    ahead += each.values()
                elif key not in _VALUES and key not in _NOT_READ:
                    ahead.append(each)


def _check_numbers(schema: Object) -> None:
    for keyword in _VALUES:
        for number in _numbers(schema.get(keyword)):
            if abs(number) > MAX_EXACT or isinstance(number, LongNumber):
                _refuse(keyword, number)
    for keyword in _BOUNDS:
        for number in _numbers(schema.get(keyword), deep=False):
            is_int64 = keyword == "maximum" and number == MAX_INT64 and schema.get("type") == "integer"
            if (abs(number) > MAX_EXACT and not is_int64) or isinstance(number, LongNumber):
                _refuse(keyword, number)
    for number in _numbers(schema.get("multipleOf"), deep=False):
        if not _is_cheap_multiple(number):
            raise ValueError(f"multipleOf: {number} takes too long to compile; it is at most {MAX_MULTIPLE}")


def _is_cheap_multiple(number: int | float) -> bool:
    exact = Decimal(repr(number)).normalize().as_tuple()
    digits = int("".join(map(str, exact.digits)))
    whole = digits * 10 ** max(0, int(exact.exponent))
    return whole <= MAX_MULTIPLE or (whole <= MAX_ROUND_MULTIPLE and digits <= MAX_ROUND_DIGITS)


def _numbers(value: object, *, deep: bool = True) -> Iterator[int | float]:
    """Yield the numbers in a JSON value."""
    ahead = [value]
    while ahead:
        each = ahead.pop()
        if isinstance(each, int | float) and not isinstance(each, bool):
            yield each
        elif deep and isinstance(each, list):
            ahead += each
        elif deep and isinstance(each, dict):
            ahead += each.values()


def _refuse(keyword: str, number: int | float) -> NoReturn:
    if isinstance(number, LongNumber):
        raise ValueError(
            f"{keyword}: {number.text[:40]} cannot be kept exactly; a number with a fraction has {MAX_DIGITS} digits at most"
        )
    shown = repr(number) if abs(number) < 10**40 else "a number of many digits"
    raise ValueError(f"{keyword}: {shown} cannot be kept exactly; numbers in a schema are at most 2^53 ({MAX_EXACT}) in size")


# Classes of characters. In a JSON string control characters, quote and backslash are escaped. llguidance writes a class that has
# all control characters (or all but line feed) as "any escape", which allows \" and \\ even where the class excludes them, as
# [^"\\] does. Without U+0000 it spells each escape out, so such a class loses this one character. So do all classes of a pattern
# with alternatives that have all control characters together: it takes alternatives of single characters as one class.

_CONTROLS = [chr(code) for code in range(32) if chr(code) != "\n"]
_PROPERTY = re.compile(r"\\[pP](?:\{[^}]*\}|.)")
_CODE = re.compile(r"\\x[0-9A-Fa-f]{2}|\\u[0-9A-Fa-f]{4}|\\U[0-9A-Fa-f]{8}|\\[xuU]\{[^}]*\}")


def _rewrite_patterns(schema: Object) -> bool:
    """Rewrite the patterns of one schema; return whether any has changed."""
    is_changed = False
    pattern = schema.get("pattern")
    if isinstance(pattern, str) and (exact := exact_classes(pattern)) != pattern:
        schema["pattern"], is_changed = exact, True
    keyed = schema.get("patternProperties")
    if isinstance(keyed, dict) and any(exact_classes(key) != key for key in keyed):
        schema["patternProperties"], is_changed = {exact_classes(key): each for key, each in keyed.items()}, True
    return is_changed


def exact_classes(pattern: str) -> str:
    """Return a regular expression whose classes llguidance keeps within JSON strings."""
    items, start = list[str](), 0
    while start < len(pattern):
        end = _end_of_item(pattern, start)
        items.append(pattern[start:end])
        start = end
    are_loose = "|" in items and _are_loose_together(items)
    return "".join(rf"[{item}&&[^\x00]]" if _is_loose(item) or (are_loose and _has_nul(item)) else item for item in items)


def _are_loose_together(items: Iterable[str]) -> bool:
    tests = [has for item in items if len(item) > 1 and (has := _membership(item)) and not (has('"') and has("\\"))]
    return all(any(has(control) for has in tests) for control in _CONTROLS)


def _has_nul(item: str) -> bool:
    has = _membership(item) if len(item) > 1 else None
    return has is not None and bool(has("\0")) and not (has('"') and has("\\"))


def _end_of_item(pattern: str, start: int) -> int:
    """Return where the escape, class or character ends that begins at `start`."""
    if pattern[start] == "\\":
        match = _PROPERTY.match(pattern, start) or _CODE.match(pattern, start)
        return match.end() if match else start + 2
    if pattern[start] != "[":
        return start + 1
    depth, at = 1, start + 1
    at += pattern.startswith("^", at)
    at += pattern.startswith("]", at)  # as the first character it is one of the class
    while at < len(pattern) and depth:
        step = 2 if pattern[at] == "\\" else 1
        depth += {"[": 1, "]": -1}.get(pattern[at], 0)
        at += step
    return at


def _is_loose(item: str) -> bool:
    """Return whether a class has the control characters, and not both quote and backslash. True for one that Python reads
    otherwise, if it may be: with sets in it, or a property."""
    if _PROPERTY.search(item):
        return True
    if not item.startswith("[") or not item.endswith("]"):
        return False
    if "[" in item[1:] or "&&" in item:
        return True
    has = _membership(item)
    return has is not None and all(map(has, _CONTROLS)) and not (has('"') and has("\\"))


def _membership(item: str) -> Callable[[str], object] | None:
    """Return a test for characters of a class; None for one that is not valid, which llguidance refuses."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        try:
            return re.compile(item).fullmatch
        except re.error:
            return None


def _dumped(schema: Object) -> str:
    try:
        return dumps(schema)
    except RecursionError:
        raise ValueError("is nested too deeply") from None


# Schemas within Lark grammars: `%json {…}` outside of texts, regular expressions and comments.

_LARK = re.compile(r'"(?:\\.|[^"\\])*"|//[^\n]*|/(?:\\.|[^/\\\n])+/|%json\b\s*', re.DOTALL)


def with_schemas(source: str, prepare: Callable[[str], str]) -> str:
    """Return a Lark grammar with each JSON schema in it as `prepare` returns it. Raises ValueError, as `prepare` does."""
    parts, at = list[str](), 0
    while found := _LARK.search(source, at):
        parts.append(source[at : found.end()])
        at = found.end()
        if found[0].startswith("%json") and (end := _end_of_object(source, at)):
            parts.append(prepare(source[at:end]))
            at = end
    return "".join(parts) + source[at:]


def _end_of_object(source: str, start: int) -> int | None:
    """Return where a JSON object ends; None for what is none, which the compiler refuses."""
    try:
        return json.JSONDecoder().raw_decode(source, start)[1]
    except (ValueError, RecursionError):
        return None
