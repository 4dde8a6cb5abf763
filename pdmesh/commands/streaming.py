"""Writes streams to the terminal: text as it comes, or JSON lines. Without rich, so that a client-only installation can do it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, is_dataclass
from enum import Enum

from pdmesh.client.types import Delta, Event, Generation
from pdmesh.client.wire import generation
from pdmesh.errors import MeshError


def show_text(events: Iterable[Event]) -> Generation:
    """Write the first choice to stdout as it comes, its reasoning before its text; those of the others when they are complete."""
    seen: list[Event] = []
    last_text, reasons = "", False
    try:
        for event in events:
            seen.append(event)
            if isinstance(event, Delta) and event.choice == 0 and (event.text or event.reasoning):
                reasons = reasons or bool(event.reasoning)
                last_text = event.reasoning
                if event.text:
                    last_text += ("\n\n" if reasons else "") + event.text
                    reasons = False
                print(last_text, end="", flush=True)
    except MeshError:
        # The error message begins on a new line.
        print(end="\n" if last_text and not last_text.endswith("\n") else "", flush=True)
        raise
    answer = generation(seen)
    if not last_text.endswith("\n"):
        print(flush=True)
    for choice in answer.choices[1:]:
        print(f"--- choice {choice.index}\n{choice.text}", flush=True)
    return answer


def show_json(events: Iterable[Event]) -> Generation:
    """Write one JSON object per event to stdout: its fields, and "event" with its kind."""
    seen: list[Event] = []
    for event in events:
        seen.append(event)
        print(json.dumps({"event": type(event).__name__.lower(), **as_json(event)}), flush=True)
    return generation(seen)


def as_json(value: object) -> dict[str, object]:
    """Return a dataclass as JSON-ready values; enums by their text."""
    assert is_dataclass(value) and not isinstance(value, type)
    return asdict(value, dict_factory=lambda pairs: {key: v.value if isinstance(v, Enum) else v for key, v in pairs})
