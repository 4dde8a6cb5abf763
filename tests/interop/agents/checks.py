"""What a program of this package is told and says. Only the standard library: it is imported in the libraries' environments.

A program is called as `python -m MODULE OPTIONS`, with JSON: {"url": of the gateway, without a path, "model": its name}. It
prints one line of JSON at its end: the checks, each with what was asked, what was got, and the problem, if there is one.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

_SHOWN = 160
QUESTION = "What is the weather in Lyon?"
WEATHER = "Sunny, 25 C"
CITY_SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}},
    "required": ["city"],
    "additionalProperties": False,
}


@dataclass(frozen=True)
class Asked:
    """One check: `problem` is empty where the library got what it should."""

    asked: str
    got: str
    problem: str = ""


@dataclass(frozen=True)
class Place:
    """Where a program finds the gateway."""

    url: str
    model: str


Check = Callable[[Place], Any]


def require(is_right: object, what: str) -> None:
    """Ends the check with this problem unless it is right; unlike an assert it also holds under `python -O`."""
    if not is_right:
        raise ValueError(what)


def serve(checks: dict[str, Check]) -> None:
    """The main function of a program. A check returns (or its coroutine does) what it got, and raises what is wrong."""
    place = Place(**json.loads(sys.argv[1]))
    print(json.dumps([asdict(_done(asked, check, place)) for asked, check in checks.items()]), flush=True)


def _done(asked: str, check: Check, place: Place) -> Asked:
    try:
        got = check(place)
        if inspect.iscoroutine(got):
            got = asyncio.run(got)
    except Exception as error:  # noqa: BLE001 - the parent reports it
        return Asked(asked, "", f"{type(error).__name__}: {error}"[:500])
    return Asked(asked, str(got)[:_SHOWN])
