"""The figures that a modelled worker reports: those of `pdmesh/engine/scheduler/stats.py`. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from pdmesh.planning.latency_model import PACE_TARGET

if TYPE_CHECKING:
    from pdmesh.simulator.workers.worker import ModelledWorker


@dataclass(slots=True)
class Counters:
    """Count since the start."""

    num_steps: int = 0
    num_prefilled: int = 0
    num_generated: int = 0
    num_preemptions: int = 0


class Census(NamedTuple):
    """Hold a worker's state at one moment."""

    num_decoding: int
    num_prefilling: int
    num_waiting: int
    num_reserved: int
    num_held: int
    num_free_blocks: int
    num_waiting_tokens: int
    decode_context: int


class Figures(NamedTuple):
    """Hold figures as of `taken_at` (simulated seconds), the end of its latest step. Those that count tokens, steps and
    preemptions do so from its start; the rest is as `protos/pdmesh/v1/worker.proto` says of the same names."""

    taken_at: float
    num_running: int
    num_waiting: int
    num_reserved: int
    num_held: int
    num_free_blocks: int
    num_total_blocks: int
    num_waiting_tokens: int
    num_prefilling: int
    num_decoding: int
    decode_context: int
    pace_s: float
    slack_s: float
    num_steps: int
    num_prefilled_tokens: int
    num_generated_tokens: int
    num_prefix_hit_tokens: int
    num_preemptions: int
    prefill: bool = False
    decode: bool = False
    draining: bool = False


def census_of(worker: ModelledWorker) -> Census:
    """Return the current state."""
    num_waiting, rows = len(worker.waiting), worker.rows
    return Census(
        len(rows.members),
        len(worker.prompts) + num_waiting,
        num_waiting,
        len(worker.reserved),
        len(worker.held),
        worker.room.num_free,
        worker.num_to_prefill,
        rows.context,
    )


def figures_of(
    worker: ModelledWorker, now: float, *, prefill: bool = False, decode: bool = False, draining: bool = False
) -> Figures:
    """Return the figures. Steps that have ended by `now` count, what has come since the last of them does not: the engine counts
    at the end of a step, then takes new requests. So a prompt is not reported before the end of the first step that holds some of
    it."""
    course, rows, counters = worker.course, worker.rows, worker.counters
    num_steps = 0 if course is None or course.pieces else course.steps_by(now)
    taken_at = now if course is None else course.began_s + course.lasts_s(num_steps)
    census = worker.before if course is not None and not num_steps and worker.before is not None else census_of(worker)
    decode_context = census.decode_context + num_steps * census.num_decoding
    grown = rows.growth(num_steps) - rows.next_growth if num_steps > 1 else 0
    pace_s, slack_s = _pace(worker, decode_context, num_steps, taken_at)
    return Figures(
        taken_at,
        census.num_decoding + census.num_prefilling - census.num_waiting,
        census.num_waiting,
        census.num_reserved,
        census.num_held,
        census.num_free_blocks - grown,
        worker.spec.num_blocks,
        census.num_waiting_tokens,
        census.num_prefilling,
        census.num_decoding,
        decode_context,
        pace_s,
        slack_s,
        counters.num_steps + num_steps,
        counters.num_prefilled,
        counters.num_generated + num_steps * census.num_decoding,
        worker.room.num_hit_tokens,
        counters.num_preemptions,
        prefill,
        decode,
        draining,
    )


def _pace(worker: ModelledWorker, decode_context: int, num_steps: int, at_s: float) -> tuple[float, float]:
    """Return the budget of the tightest row; without one, the least budget that any row here can have, and no slack."""
    if not worker.spec.keeps_pace:
        return 0.0, 0.0
    num_rows = len(worker.rows)
    decode_s = worker.spec.speed.decode_s(num_rows, decode_context)
    pace = worker.paces.tightest(decode_s, worker.rows.step + num_steps, at_s)
    if pace is not None:
        return pace.pace_s, pace.slack_s
    return PACE_TARGET * min([goal_s for goal_s in worker.goals if goal_s > decode_s], default=0.0), 0.0
