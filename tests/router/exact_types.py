"""Checks that a union of event types is exact: all kinds occur, and a field too many or too few is a problem."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, get_args

from pydantic import TypeAdapter, ValidationError

Change = Callable[[dict[str, Any]], object]
FREE = frozenset({"metadata", "timings", "parameters", "schema", "input"})
"""Fields that hold any members."""
OPTIONAL = frozenset({"pdmesh", "warnings", "obfuscation", "details"})


def kinds(union: Any) -> set[str]:
    """The values of `type` in a union of events."""
    forms = get_args(get_args(union)[0])
    return {value for form in forms for value in get_args(form.model_fields["type"].annotation)}


def check(union: Any, events: Sequence[Mapping[str, Any]]) -> None:
    """Raise AssertionError where a kind of event is missing, or where a changed event passes."""
    adapter = TypeAdapter(union)
    assert {event["type"] for event in events} == kinds(union)
    for event in events:
        adapter.validate_python(event)
        for path in _objects(event):
            _check_refused(adapter, event, path, lambda at: at.update(other=1), "other")
            for name in _at(event, path).keys() - OPTIONAL:
                _check_refused(adapter, event, path, lambda at, name=name: at.pop(name), name)  # type: ignore[misc]


def _check_refused(adapter: TypeAdapter[Any], event: Mapping[str, Any], path: Sequence[Any], change: Change, name: str) -> None:
    changed = copy.deepcopy(event)
    change(_at(changed, path))
    try:
        adapter.validate_python(changed)
    except ValidationError:
        return
    raise AssertionError(f"{event['type']}: {'.'.join(map(str, path))}: nothing says whether {name!r} belongs there")


def _objects(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if isinstance(value, dict):
        yield path
    members = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, each in members:
        if name not in FREE:
            yield from _objects(each, (*path, name))


def _at(value: Any, path: Sequence[Any]) -> Any:
    for name in path:
        value = value[name]
    return value
