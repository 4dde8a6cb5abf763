"""What the engine around vLLM counts, in the fields that every engine of a worker reports."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pdmesh.engine.outputs import EngineStats, RequestStarted, SequenceUpdate, StepWork
from pdmesh_vllm.requests import Choice, Group, State

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler

NO_WORK = StepWork(0, 0, 0, 0)


@dataclass
class Counters:
    """Count since start."""

    num_steps: int = 0
    num_generated_tokens: int = 0
    num_prefilled_tokens: int = 0
    num_prefix_hit_tokens: int = 0
    num_preemptions: int = 0


def decodes(choice: Choice, num_computed: int, count: int = 1) -> bool:
    """Return whether `count` tokens of a choice behind so many computed ones are decoding: beyond its prompt and history, or the
    first token that came with its KV."""
    return (choice.is_taken_over and count == 1) or num_computed >= len(choice.group.request.prompt) + choice.num_in_prompt


def work_of(rows: Sequence[tuple[Choice, int, int]]) -> StepWork:
    """Return what a step computes; `rows`: choice, tokens computed before, tokens in the step."""
    prefill_tokens = prefill_context = num_decoding = decode_context = 0
    for choice, before, count in rows:
        if decodes(choice, before, count):
            num_decoding += count
            decode_context += before + count
        else:
            prefill_tokens += count
            prefill_context += count * before + count * (count + 1) // 2
    return StepWork(prefill_tokens, prefill_context, num_decoding, decode_context)


def stats_of(scheduler: Scheduler, groups: Iterable[Group], counters: Counters, num_cached_blocks: int) -> EngineStats:
    """Return the counts of now. Call it on the engine's thread, or before that has started."""
    pool = scheduler.kv_cache_manager.block_pool
    running = {request.request_id for request in scheduler.running}
    num = dict.fromkeys(("running", "waiting", "reserved", "held", "waiting_tokens", "decoding", "context", "prefilling"), 0)
    for group in groups:
        for choice in group.choices:
            if group.state is State.HELD:
                num["held"] += 1
            elif group.state is not State.ACTIVE:
                num["reserved"] += 1
            else:
                _count(num, choice, is_running=choice.name in running, done=_computed(scheduler, choice))
    return EngineStats(
        taken_ns=time.monotonic_ns(),
        num_running=num["running"],
        num_waiting=num["waiting"],
        num_reserved=num["reserved"],
        num_held=num["held"],
        num_free_blocks=pool.get_num_free_blocks(),
        num_total_blocks=pool.num_gpu_blocks - 1,  # block 0 is vLLM's own
        num_cached_blocks=num_cached_blocks,
        num_waiting_tokens=num["waiting_tokens"],
        num_decoding=num["decoding"],
        decode_context=num["context"],
        num_prefilling=num["prefilling"],
        num_steps=counters.num_steps,
        num_generated_tokens=counters.num_generated_tokens,
        num_prefilled_tokens=counters.num_prefilled_tokens,
        num_prefix_hit_tokens=counters.num_prefix_hit_tokens,
        num_preemptions=counters.num_preemptions,
    )


def _computed(scheduler: Scheduler, choice: Choice) -> int:
    request = scheduler.requests.get(choice.name)
    return 0 if request is None else int(request.num_computed_tokens)


def _count(num: dict[str, int], choice: Choice, *, is_running: bool, done: int) -> None:
    num["running" if is_running else "waiting"] += 1
    if decodes(choice, done):
        num["decoding"] += is_running
        num["context"] += choice.num_tokens if is_running else 0
    else:
        num["prefilling"] += 1
        num["waiting_tokens"] += max(0, choice.num_tokens - done)


def took_part(rows: Sequence[tuple[Choice, int, int]], counters: Counters, started_ns: int, ended_ns: int) -> list[Group]:
    """Return the groups of a step's choices, whose clocks and prefilled tokens are counted; `rows` as for `work_of`."""
    groups: dict[int, tuple[Group, int]] = {}
    for choice, num_computed, count in rows:
        group = choice.group
        groups[id(group)] = (group, groups.get(id(group), (group, 0))[1] + count)
        if not decodes(choice, num_computed, count):
            counters.num_prefilled_tokens += count
    for group, count in groups.values():
        if group.clock is not None:
            cached = group.choices[0].num_cached
            group.clock.took_part(started_ns, ended_ns, num_tokens=count, num_cached_tokens=cached)
    return [group for group, _ in groups.values()]


def started_of(groups: Sequence[Group], updates: Sequence[SequenceUpdate]) -> tuple[RequestStarted, ...]:
    """Return the news of requests that have started, each once, beside their first update."""
    drew = {update.request_id for update in updates}
    news = []
    for group in groups:
        has_drawn = group.request.request_id in drew
        if group.clock is not None and group.started is None:
            group.started = group.clock.try_stop(group.request.request_id, drew_token=has_drawn)
        if has_drawn and group.started is not None and not group.has_told_start:
            group.has_told_start = True
            news.append(group.started)
    return tuple(news)
