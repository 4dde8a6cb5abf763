"""What a model server's /metrics say of its load: the names of vLLM, which pdmesh's workers have, too. Pure.

Gauges say what runs and waits; counters and sums, compared with the reading before, how fast the server is.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from pdmesh.planning.latency_fit import LatencyFit
from pdmesh.planning.latency_message import STEP_METRIC, STEP_PARTS
from pdmesh.planning.latency_model import LatencyModel, Work
from router.routing.cost_model import NEUTRAL
from router.routing.fleet_snapshot import is_usable

MAX_BLOCKS = 1 << 30
_RUNNING, _WAITING, _USED = "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"
_PREFILL_S, _PROMPTS = "vllm:request_prefill_time_seconds_sum", "vllm:request_prefill_time_seconds_count"
_PROMPT_TOKENS, _HITS = "vllm:prompt_tokens_total", "vllm:prefix_cache_hits_total"
_GAP_S, _GAPS = "vllm:inter_token_latency_seconds_sum", "vllm:inter_token_latency_seconds_count"
_OLD_NAMES = {  # of vLLM before 0.11
    "vllm:gpu_cache_usage_perc": _USED,
    "vllm:time_per_output_token_seconds_sum": _GAP_S,
    "vllm:time_per_output_token_seconds_count": _GAPS,
    "vllm:gpu_prefix_cache_hits_total": _HITS,
}
_NAMES = (_RUNNING, _WAITING, _USED, _PREFILL_S, _PROMPTS, _PROMPT_TOKENS, _HITS, _GAP_S, _GAPS, *_OLD_NAMES)
_SAMPLE = re.compile(r"(?:\{[^}\n]*\})? (\S+)")
_SPEED = re.compile(r'part="(\w+)"[^}\n]*\} (\S+)')
_LABEL = re.compile(r'(block_size|num_gpu_blocks)="([0-9]{1,10})"')


@dataclass(frozen=True)
class ServerLoad:
    """Hold one reading. `used`: share of the KV blocks; `num_blocks` 0: the server does not say. The rest grows while it runs:
    seconds of prefills, prompts, their tokens, of those cached ones, seconds between tokens and how many. `speed`: what a server
    of pdmesh says itself of its steps."""

    num_running: int = 0
    num_waiting: int = 0
    used: float = 0.0
    block_size: int = 16
    num_blocks: int = 0
    prefill_s: float = 0.0
    num_prompts: float = 0.0
    prompt_tokens: float = 0.0
    cached_tokens: float = 0.0
    gap_s: float = 0.0
    num_gaps: float = 0.0
    speed: LatencyModel | None = None


def read_metrics(text: str) -> ServerLoad | None:
    """Return what Prometheus' text format says; None where no line is of a model server. Several engines of one server (data
    parallel) add up, but for the share of blocks in use, of which the largest counts."""
    sums, found = defaultdict[str, float](float), False
    for name, value in _samples(text):
        number = _number(value)
        if number is not None:
            found, name = True, _OLD_NAMES.get(name, name)
            sums[name] = max(sums[name], number) if name == _USED else sums[name] + number
    if not found:
        return None
    configs = [dict(_LABEL.findall(labels)) for labels in _lines_of(text, "vllm:cache_config_info{")]
    sizes = [int(each["block_size"]) for each in configs if int(each.get("block_size", 0)) > 0]
    return ServerLoad(
        num_running=round(sums[_RUNNING]),
        num_waiting=round(sums[_WAITING]),
        used=min(1.0, sums[_USED]),
        block_size=sizes[0] if sizes else ServerLoad.block_size,
        num_blocks=min(MAX_BLOCKS, sum(int(each.get("num_gpu_blocks", 0)) for each in configs)),
        prefill_s=sums[_PREFILL_S],
        num_prompts=sums[_PROMPTS],
        prompt_tokens=sums[_PROMPT_TOKENS],
        cached_tokens=sums[_HITS],
        gap_s=sums[_GAP_S],
        num_gaps=sums[_GAPS],
        speed=_speed_of(text),
    )


def _speed_of(text: str) -> LatencyModel | None:
    """Return a latency model that the server gives; None where it gives none, or one that no prediction can use."""
    found = [sample for line in _lines_of(text, f"{STEP_METRIC}{{") if (sample := _SPEED.search(line)) is not None]
    parts = {sample[1]: _number(sample[2]) for sample in found}
    known = [each for part in STEP_PARTS if (each := parts.get(part)) is not None]
    if len(known) < len(STEP_PARTS):
        return None
    fixed_s, token_s, context_s, row_s, row_context_s = known
    model = LatencyModel(fixed_s, token_s, context_s, row_s, row_context_s)
    return model if is_usable(model) else None


def _samples(text: str) -> Iterator[tuple[str, str]]:
    """Yield names and values of the samples that count. A page has hundreds of others: to look for each name is ten times faster
    than to match every line."""
    for name in _NAMES:
        for rest in _lines_of(text, name):
            sample = _SAMPLE.match(rest)
            if sample is not None:  # else a longer name, which begins the same
                yield name, sample[1]


def _lines_of(text: str, beginning: str) -> Iterator[str]:
    """Yield what follows `beginning` in the lines that begin with it."""
    at = 0 if text.startswith(beginning) else text.find(f"\n{beginning}") + 1
    while at or text.startswith(beginning):
        end = text.find("\n", at)
        yield text[at + len(beginning) : end if end >= 0 else len(text)]
        if end < 0:
            return
        at = text.find(f"\n{beginning}", end) + 1
        if not at:
            return


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) and 0 <= number < 1e15 else None


class ServerSpeed:
    """Learn a server's latency model from differences of its readings: the mean prefill and the mean gap between tokens."""

    def __init__(self) -> None:
        self._fit = LatencyFit(NEUTRAL)
        self._before: ServerLoad | None = None
        self._is_known = False
        self.model: LatencyModel | None = None

    def observe(self, load: ServerLoad, now: float) -> None:
        """Compare a reading with the one before it."""
        before, self._before = self._before, load
        if load.speed is not None:
            self.model = load.speed
            return
        if before is None or load.num_prompts < before.num_prompts or load.num_gaps < before.num_gaps:
            return  # the first one, or the server has started anew
        self._observe_prompts(load, before)
        self._observe_gaps(load, before)
        if self._is_known:
            self.model = self._fit.model(now)

    def _observe_prompts(self, load: ServerLoad, before: ServerLoad) -> None:
        num_prompts = load.num_prompts - before.num_prompts
        computed = (load.prompt_tokens - before.prompt_tokens) - (load.cached_tokens - before.cached_tokens)
        seconds = load.prefill_s - before.prefill_s
        if num_prompts >= 1 and computed >= num_prompts and seconds > 0:
            each = round(computed / num_prompts)
            self._fit.observe(Work(prefill_tokens=each, prefill_context=each * each // 2), seconds / num_prompts)
            self._is_known = True

    def _observe_gaps(self, load: ServerLoad, before: ServerLoad) -> None:
        num_gaps, seconds = load.num_gaps - before.num_gaps, load.gap_s - before.gap_s
        rows = max(1, (load.num_running + before.num_running) // 2)
        if num_gaps >= 1 and seconds > 0:
            context = round(load.used * load.num_blocks * load.block_size)
            self._fit.observe(Work(num_decoding=rows, decode_context=context), seconds / num_gaps)
            self._is_known = True
