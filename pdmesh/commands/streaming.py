"""Streams on the terminal: text as it comes, or JSON lines; then the timings when asked for."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from dataclasses import asdict, is_dataclass
from enum import Enum

from pdmesh.client.types import Completed, Delta, Event, Generation, PrefillMode, Timings, Usage
from pdmesh.client.wire import generation
from pdmesh.errors import MeshError
from pdmesh.terminal import Palette, breakdown, duration, palette, size

# Where the time of one request went, as text: the parts of the TTFT, the first gap, the pace, the hand-off, the caches.


def timings_report(completed: Completed, colours: Palette) -> list[str]:
    """Lines for the terminal. The parts, each measured by itself, are summed up and set against the TTFT measured as a whole."""
    timings = completed.timings
    return [
        *_ttft(timings, colours),
        *_first_gap(timings, colours),
        *_pace(timings, completed.usage, colours),
        *_drafts(completed.usage, colours),
        *_handoff(timings, colours),
        *_caches(timings, completed.usage, colours),
        *_troubles(completed, colours),
    ]


def _ttft(timings: Timings, colours: Palette) -> list[str]:
    total = sum(timings.ttft_parts.values())
    difference = 100 * abs(total - timings.ttft_ns) / timings.ttft_ns if timings.ttft_ns else 0.0
    return [
        colours.bold(f"time to first token  {duration(timings.ttft_ns)}"),
        *_indented(breakdown(timings.ttft_parts, timings.ttft_ns)),
        colours.faint(
            f"  sum of the parts {duration(total)}; measured as a whole {duration(timings.ttft_ns)} ({difference:.1f} % apart)"
        ),
    ]


def _first_gap(timings: Timings, colours: Palette) -> list[str]:
    parts = timings.first_gap_parts
    if not any(parts.values()):
        return []
    head = colours.bold(f"added to the first gap  {duration(sum(parts.values()))}")
    return [head, *_indented(breakdown(parts, sum(parts.values())))]


def _pace(timings: Timings, usage: Usage, colours: Palette) -> list[str]:
    pace = (
        f"{duration(timings.tpot_ns)} per output token ({1e9 / timings.tpot_ns:.1f} tokens/s)" if timings.tpot_ns else "one token"
    )
    tokens = f"{usage.prompt_tokens} prompt and {usage.completion_tokens} output tokens"
    return [
        f"{colours.bold('TPOT')}      {pace}",
        f"{colours.bold('total')}     {duration(timings.total_ns)} for {tokens}",
    ]


def _drafts(usage: Usage, colours: Palette) -> list[str]:
    if not usage.drafted_tokens:
        return []
    return [f"{colours.bold('guesses')}   drafted {usage.drafted_tokens}, kept {usage.accepted_tokens}"]


def _handoff(timings: Timings, colours: Palette) -> list[str]:
    head = colours.bold("hand-off")
    if timings.mode is not PrefillMode.REMOTE:
        return [f"{head}  none: {timings.decode_worker or 'the decode worker'} prefilled the prompt itself"]
    route = f"{timings.prefill_worker} → {timings.decode_worker}"
    return [f"{head}  {size(timings.kv_bytes)} of KV over {timings.transport or 'no transport'}, {route}"]


def _caches(timings: Timings, usage: Usage, colours: Palette) -> list[str]:
    return [
        f"{colours.bold('caches')}    prefill had {timings.prefill_cached_tokens} and decode {timings.decode_cached_tokens}"
        f" of the prompt's {usage.prompt_tokens} tokens"
    ]


def _troubles(completed: Completed, colours: Palette) -> list[str]:
    timings = completed.timings
    counts = {
        "prefill retries": timings.num_retries,
        "decode workers lost": timings.num_resubmissions,
        "routers lost": completed.num_resumes,
    }
    happened = [f"{count} {name}" for name, count in counts.items() if count]
    return [colours.warning("survived  " + ", ".join(happened))] if happened else []


def _indented(lines: list[str]) -> list[str]:
    return [f"  {line}" for line in lines]


def show_text(events: Iterable[Event]) -> Generation:
    """Writes the text of the first choice to stdout as it comes, those of the others when they are complete."""
    seen: list[Event] = []
    last_text = ""
    try:
        for event in events:
            seen.append(event)
            if isinstance(event, Delta) and event.choice == 0 and event.text:
                last_text = event.text
                print(event.text, end="", flush=True)
    except MeshError:
        # What is said about the error begins on a line of its own.
        print(end="\n" if last_text and not last_text.endswith("\n") else "", flush=True)
        raise
    answer = generation(seen)
    if not last_text.endswith("\n"):
        print(flush=True)
    for choice in answer.choices[1:]:
        print(f"--- choice {choice.index}\n{choice.text}", flush=True)
    return answer


def show_json(events: Iterable[Event]) -> Generation:
    """Writes one JSON object per event to stdout: its fields, and "event" with its kind."""
    seen: list[Event] = []
    for event in events:
        seen.append(event)
        print(json.dumps({"event": type(event).__name__.lower(), **as_json(event)}), flush=True)
    return generation(seen)


def show_timings(answer: Generation) -> None:
    """Writes where the time went to stderr, so that stdout holds the answer alone."""
    completed = Completed(answer.usage, answer.timings, answer.num_resumes)
    print("\n".join(["", *timings_report(completed, palette(sys.stderr))]), file=sys.stderr)


def as_json(value: object) -> dict[str, object]:
    """A dataclass as JSON-ready values; enums by their text."""
    assert is_dataclass(value) and not isinstance(value, type)
    return asdict(value, dict_factory=lambda pairs: {key: v.value if isinstance(v, Enum) else v for key, v in pairs})
