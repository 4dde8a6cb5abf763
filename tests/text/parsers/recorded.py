"""Recorded outputs: what models write, in our own words, with the message that it is. One file of `recorded/` for each format.

A shape has the `output`, and what comes of it: `content`, `thoughts`, `calls` (a name, a space, the arguments as they are sent),
`warning` (all of them, with "; " between), `cut`: the last call is not whole. `begun`: the prompt ends within thoughts. Calls in
the files of reasoning formats are those of Hermes.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pdmesh.text.parsers.events import Call, Message
from pdmesh.text.parsers.registry import NONE, REASONING_FORMATS, TOOL_FORMATS

FOLDER = Path(__file__).parent / "recorded"
REASONING = "reasoning_"
SCHEMAS: Mapping[str, Mapping[str, Any]] = {
    "weather": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    "note": {"type": "object", "properties": {"text": {"type": "string"}}},
    "plan": {
        "type": "object",
        "properties": {
            "steps": {"type": "array"},
            "deep": {"type": "object"},
            "share": {"type": "number"},
            "on": {"type": "boolean"},
        },
    },
    "stop": {"type": "object", "properties": {}},
}
KEYS = {"output", "content", "thoughts", "calls", "warning", "cut", "begun"}


@dataclass(frozen=True)
class Shape:
    """One recorded output, the formats that it is read in, and the message that it is, without ids of calls."""

    title: str
    tools: str
    reasoning: str
    has_begun: bool
    output: str
    message: Message


def names() -> list[str]:
    """All files, by the formats that there are."""
    return [*TOOL_FORMATS, *(REASONING + name for name in REASONING_FORMATS)]


def shapes(name: str) -> list[Shape]:
    """The shapes of one file. Raises KeyError or ValueError for one that is written wrong."""
    is_reasoning = name.startswith(REASONING)
    tools, reasoning = ("hermes", name.removeprefix(REASONING)) if is_reasoning else (name, NONE)
    written = tomllib.loads((FOLDER / f"{name}.toml").read_text(encoding="utf-8"))
    return [
        Shape(title, tools, reasoning, said.get("begun", False), said["output"], _message(title, said))
        for title, said in written.items()
    ]


def _message(title: str, said: Mapping[str, Any]) -> Message:
    if wrong := said.keys() - KEYS:
        raise ValueError(f"{title}: {wrong} is not known")
    calls = list(_calls(said.get("calls", ()), is_cut=said.get("cut", False)))
    warnings = [said["warning"]] if "warning" in said else []
    return Message(said.get("content", ""), said.get("thoughts", ""), calls, warnings)


def _calls(written: Sequence[str], *, is_cut: bool) -> Iterator[Call]:
    for number, each in enumerate(written, start=1):
        name, _, arguments = each.partition(" ")
        yield Call(name, "", arguments, is_whole=not (is_cut and number == len(written)))
