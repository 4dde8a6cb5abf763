"""Shows where the time of one request went: the parts of the TTFT, the first gap, TPOT, the hand-off, prefix hits."""

from __future__ import annotations

import sys

from rich.console import RenderableType
from rich.padding import Padding
from rich.text import Text

from pdmesh.client.types import Completed, Generation, PrefillMode, Timings, Usage
from pdmesh.terminal import breakdown, duration, show, size


def show_timings(answer: Generation) -> None:
    """Write where the time went to stderr, so that stdout holds the answer alone."""
    completed = Completed(answer.usage, answer.timings, answer.num_resumes)
    show("", *timings_report(completed), stream=sys.stderr)


def timings_report(completed: Completed) -> list[RenderableType]:
    """Return lines for the terminal. The parts, each measured by itself, are summed up and compared with the TTFT measured as a
    whole."""
    timings = completed.timings
    return [
        *_ttft(timings),
        *_first_gap(timings),
        *_pace(timings, completed.usage),
        *_drafts(completed.usage),
        *_handoff(timings),
        *_caches(timings, completed.usage),
        *_troubles(completed),
    ]


def _ttft(timings: Timings) -> list[RenderableType]:
    total = sum(timings.ttft_parts.values())
    difference = 100 * abs(total - timings.ttft_ns) / timings.ttft_ns if timings.ttft_ns else 0.0
    return [
        Text(f"time to first token  {duration(timings.ttft_ns)}", "bold"),
        _indented(breakdown(timings.ttft_parts, timings.ttft_ns)),
        Text(
            f"  sum of the parts {duration(total)}; measured as a whole {duration(timings.ttft_ns)} ({difference:.1f} % apart)",
            "faint",
        ),
    ]


def _first_gap(timings: Timings) -> list[RenderableType]:
    parts = timings.first_gap_parts
    if not any(parts.values()):
        return []
    head = Text(f"added to the first gap  {duration(sum(parts.values()))}", "bold")
    return [head, _indented(breakdown(parts, sum(parts.values())))]


def _pace(timings: Timings, usage: Usage) -> list[RenderableType]:
    pace = (
        f"{duration(timings.tpot_ns)} per output token ({1e9 / timings.tpot_ns:.1f} tokens/s)" if timings.tpot_ns else "one token"
    )
    tokens = f"{usage.prompt_tokens} prompt and {usage.completion_tokens} output tokens"
    return [
        Text.assemble(("TPOT", "bold"), f"      {pace}"),
        Text.assemble(("total", "bold"), f"     {duration(timings.total_ns)} for {tokens}"),
    ]


def _drafts(usage: Usage) -> list[RenderableType]:
    if not usage.drafted_tokens:
        return []
    return [Text.assemble(("guesses", "bold"), f"   drafted {usage.drafted_tokens}, kept {usage.accepted_tokens}")]


def _handoff(timings: Timings) -> list[RenderableType]:
    head = ("hand-off", "bold")
    if timings.mode is not PrefillMode.REMOTE:
        return [Text.assemble(head, f"  none: {timings.decode_worker or 'the decode worker'} prefilled the prompt itself")]
    route = f"{timings.prefill_worker} → {timings.decode_worker}"
    sent = f"{size(timings.kv_bytes)} of KV over {timings.transport or 'no transport'}"
    return [Text.assemble(head, f"  {sent}, {route}")]


def _caches(timings: Timings, usage: Usage) -> list[RenderableType]:
    held = f"prefill had {timings.prefill_cached_tokens} and decode {timings.decode_cached_tokens}"
    moved = {"fetched": timings.fetched_tokens, "restored": timings.restored_tokens, "rounded": timings.rounded_tokens}
    came = "".join(f", {count} of them {how}" for how, count in moved.items() if count)
    return [Text.assemble(("caches", "bold"), f"    {held} of the prompt's {usage.prompt_tokens} tokens{came}")]


def _troubles(completed: Completed) -> list[RenderableType]:
    timings = completed.timings
    counts = {
        "prefill retries": timings.num_retries,
        "decode workers lost": timings.num_resubmissions,
        "routers lost": completed.num_resumes,
    }
    happened = [f"{count} {name}" for name, count in counts.items() if count]
    return [Text("survived  " + ", ".join(happened), "warning")] if happened else []


def _indented(part: RenderableType) -> RenderableType:
    return Padding(part, (0, 0, 0, 2), expand=False)
