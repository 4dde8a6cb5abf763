"""Plans the workload: a seed and a description in, planned sessions out. Pure.

A session is one request, or a conversation: each further turn is due when the answer to the previous one is complete and its
think time is over, or in a replay when the trace says so. Prompts are segments, named pieces of a number of tokens: the same
name is the same tokens, which is how prompts share a prefix. Arrivals and contents have separate random numbers: other lengths do
not move the arrivals.
"""

from __future__ import annotations

import random
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, takewhile
from pathlib import Path

from pdmesh.client.types import Priority
from pdmesh.loadtest import arrivals
from pdmesh.loadtest.arrivals import Distribution, fixed, parse
from pdmesh.loadtest.record import Objectives
from pdmesh.loadtest.sessions import Agents
from pdmesh.loadtest.traces import TraceRow, sessions_of


@dataclass(frozen=True, slots=True)
class Segment:
    """Name a piece of a prompt. Equal keys are equal tokens, up to the shorter length."""

    key: str
    num_tokens: int


@dataclass(frozen=True)
class TrafficClass:
    """Describe a kind of request: its share of all (relative to the others'), its lengths, its tenant and priority."""

    name: str = "standard"
    share: float = 1.0
    priority: str = "standard"
    tenant: str = ""
    input_tokens: Distribution = field(default=fixed(128))
    output_tokens: Distribution = field(default=fixed(64))


@dataclass(frozen=True, slots=True)
class PlannedTurn:
    """Plan one request. `think_s` after the answer before it; `cancel_after_s` after it was due, None: it runs to its end.

    A turn of a trace has `due_s`, its time in the run, in place of a think time, and `segments` are its whole prompt. It follows
    turn number `after`, None: the one before it."""

    think_s: float
    segments: tuple[Segment, ...]
    output_tokens: int
    cancel_after_s: float | None = None
    due_s: float | None = None
    after: int | None = None

    @property
    def num_new_tokens(self) -> int:
        """Return what this turn adds to a conversation, its answer included."""
        return sum(segment.num_tokens for segment in self.segments) + self.output_tokens


@dataclass(frozen=True, slots=True)
class PlannedSession:
    """Plan a conversation (mostly of one turn) that starts `at_s` seconds after the run."""

    index: int
    at_s: float
    traffic: TrafficClass
    turns: tuple[PlannedTurn, ...]

    def former(self, number: int) -> int:
        """Return the turn that turn `number` follows; -1 for the first one."""
        after = self.turns[number].after
        return number - 1 if after is None else after

    def next_turns(self, number: int) -> list[int]:
        """Return the turns that follow turn `number`: one at most, but several where a trace's conversation branches."""
        return [later for later in range(number + 1, len(self.turns)) if self.former(later) == number]

    def depth(self, number: int) -> int:
        """Return how many turns came before turn `number`, on its branch."""
        depth = 0
        while (number := self.former(number)) >= 0:
            depth += 1
        return depth


@dataclass(frozen=True)
class Limits:
    """Hold the limits of the target: None is no limit. Longer prompts and outputs are cut to fit."""

    max_input_tokens: int | None = None
    max_output_tokens: int | None = None
    max_context: int | None = None

    def lengths(self, input_tokens: int, output_tokens: int) -> tuple[int, int]:
        """Return both lengths, cut if needed; at least 1."""
        output_tokens = min(output_tokens, self.max_output_tokens or output_tokens)
        if self.max_context is not None:
            output_tokens = max(1, min(output_tokens, self.max_context - 1))
            input_tokens = max(1, min(input_tokens, self.max_context - output_tokens))
        return min(input_tokens, self.max_input_tokens or input_tokens), output_tokens


def num_cut(rows: Sequence[TraceRow], limits: Limits) -> int:
    """Return how many rows of a trace are longer than the limits."""
    return sum(limits.lengths(row.input_tokens, row.output_tokens) != (row.input_tokens, row.output_tokens) for row in rows)


@dataclass(frozen=True)
class Arrivals:
    """Describe when sessions start. `kind`: poisson, gamma, constant or ramp; rates in sessions per second."""

    kind: str = "poisson"
    rate: float = 1.0
    burstiness: float = 1.0
    ramp_to: float = 1.0

    def times(self, duration_s: float, rng: random.Random) -> Iterator[float]:
        """Yield the arrivals of `duration_s` seconds."""
        kinds = {
            "poisson": lambda: arrivals.poisson(self.rate, rng),
            "gamma": lambda: arrivals.gamma(self.rate, self.burstiness, rng),
            "constant": lambda: arrivals.constant(self.rate),
            "ramp": lambda: arrivals.ramp(self.rate, self.ramp_to, duration_s, rng),
        }
        return takewhile(lambda at_s: at_s < duration_s, kinds[self.kind]())


@dataclass(frozen=True)
class Workload:
    """Hold everything that determines a plan, except its seed and length. With a `trace` to replay, `arrivals`, `agents` and
    `prefix_tokens` do not count; rows that follow others are turns of sessions. With `length_rows`, the classes' lengths do not
    count: pairs of lengths are drawn from the rows instead. `max_sessions`: the plan ends after so many."""

    arrivals: Arrivals = field(default_factory=Arrivals)
    classes: tuple[TrafficClass, ...] = (TrafficClass(),)
    trace: tuple[TraceRow, ...] = ()
    trace_speed: float = 1.0
    length_rows: tuple[TraceRow, ...] = ()
    prefix_tokens: int = 0
    num_prefixes: int = 1
    turns: Distribution = field(default=fixed(1))
    think_s: Distribution = field(default=fixed(0))
    agents: Agents = field(default_factory=Agents)
    max_sessions: int | None = None
    cancel_share: float = 0.0
    cancel_after_s: Distribution = field(default=Distribution("exponential", (1,)))
    limits: Limits = field(default_factory=Limits)


def plan(workload: Workload, seed: int, duration_s: float) -> Iterator[PlannedSession]:
    """Yield the sessions that start within `duration_s` seconds, by time. The same arguments give the same sessions."""
    planner = _Planner(workload, seed)
    if workload.trace:
        planned = planner.replay(duration_s)
    else:
        times = workload.arrivals.times(duration_s, random.Random(f"{seed}/arrivals"))
        planned = (planner.session(index, at_s) for index, at_s in enumerate(times))
    return islice(planned, workload.max_sessions)


class _Planner:
    """Draw the sessions of one plan, one after the other."""

    def __init__(self, workload: Workload, seed: int) -> None:
        self._workload = workload
        self._rng = random.Random(f"{seed}/contents")
        self._shares = [traffic.share for traffic in workload.classes]
        self._system_prompts = workload.agents.system_prompts(seed)

    def session(self, index: int, at_s: float) -> PlannedSession:
        workload, rng = self._workload, self._rng
        row = rng.choice(workload.length_rows) if workload.length_rows else None
        traffic = rng.choices(workload.classes, self._shares)[0]
        num_turns = workload.turns.draw_count(rng)
        turns = [self._turn(f"{index}.{number}", traffic, row, first=number == 0) for number in range(num_turns)]
        return PlannedSession(index, at_s, traffic, self._within_context(turns))

    def replay(self, duration_s: float) -> Iterator[PlannedSession]:
        """Yield the sessions of the trace, with the turns that are due within `duration_s`."""
        workload = self._workload
        times = list(arrivals.replay((row.at_s for row in workload.trace), workload.trace_speed))
        for index, members in enumerate(sessions_of(workload.trace)):
            if times[members[0]] >= duration_s:
                return
            traffic = self._rng.choices(workload.classes, self._shares)[0]
            due = [number for number in members if times[number] < duration_s]
            places = {number: place for place, number in enumerate(due)}
            turns = []
            for place, number in enumerate(due):
                row = workload.trace[number]
                turn = self._turn(f"{index}.{place}", traffic, row, first=place == 0)
                after = places[row.after] if place and row.after is not None else None
                turns.append(replace(turn, think_s=0.0, due_s=times[number], after=after))
            yield PlannedSession(index, times[members[0]], traffic, tuple(turns))

    def _turn(self, name: str, traffic: TrafficClass, row: TraceRow | None, *, first: bool) -> PlannedTurn:
        workload, rng, agents = self._workload, self._rng, self._workload.agents
        is_tool = not first and not workload.trace and agents.is_tool(rng)
        system = self._system_prompt() if first and not workload.trace else None
        if row is not None:
            num_input, num_output = row.input_tokens, row.output_tokens
        else:
            num_input, num_output = traffic.input_tokens.draw_count(rng), traffic.output_tokens.draw_count(rng)
        if is_tool:
            num_input = agents.tool_tokens.draw_count(rng)
        num_input, num_output = workload.limits.lengths(num_input + (system.num_tokens if system else 0), num_output)
        if workload.trace and row is not None and row.blocks:
            segments = _block_segments(row, num_input, name)
        elif system is not None:
            segments = _behind(system, num_input, name)
        else:
            segments = self._segments(name, num_input, first=first)
        think_s = 0.0 if first else (agents.tool_think_s if is_tool else workload.think_s).draw(rng)
        return PlannedTurn(think_s, segments, num_output, self._cancellation())

    def _system_prompt(self) -> Segment | None:
        if not self._system_prompts:
            return None
        number = self._rng.randrange(len(self._system_prompts))
        return Segment(f"system{number}", self._system_prompts[number])

    def _segments(self, name: str, num_tokens: int, *, first: bool) -> tuple[Segment, ...]:
        """Return a shared prefix before at least one token of its own; later turns have their conversation as prefix."""
        num_shared = min(self._workload.prefix_tokens, num_tokens - 1) if first else 0
        if num_shared <= 0:
            return (Segment(name, num_tokens),)
        return _behind(Segment(f"prefix{self._rng.randrange(self._workload.num_prefixes)}", num_shared), num_tokens, name)

    def _cancellation(self) -> float | None:
        if self._rng.random() >= self._workload.cancel_share:
            return None
        return self._workload.cancel_after_s.draw(self._rng)

    def _within_context(self, turns: Sequence[PlannedTurn]) -> tuple[PlannedTurn, ...]:
        """Return as many turns as the model's context holds, the first in any case."""
        max_context = self._workload.limits.max_context
        kept, used = list(turns[:1]), turns[0].num_new_tokens
        for turn in turns[1:]:
            used += turn.num_new_tokens
            if max_context is not None and used > max_context:
                break
            kept.append(turn)
        return tuple(kept)


def _behind(shared: Segment, num_tokens: int, name: str) -> tuple[Segment, Segment]:
    """Return a prompt of `num_tokens` that begins with `shared`, cut if need be: at least one token is the prompt's own."""
    num_shared = min(shared.num_tokens, num_tokens - 1)
    return Segment(shared.key, num_shared), Segment(name, num_tokens - num_shared)


def _block_segments(row: TraceRow, num_tokens: int, name: str) -> tuple[Segment, ...]:
    """Return a segment for each block of the trace; what follows the last of them belongs to this request alone."""
    segments = []
    for number, block in enumerate(row.blocks):
        start, end = row.edge(number), min(row.edge(number + 1), num_tokens)
        if start >= end:
            break
        segments.append(Segment(f"block{block}", end - start))
    rest = num_tokens - min(row.edge(len(row.blocks)), num_tokens)
    return (*segments, *([Segment(name, rest)] if rest else ()))


# Classes of traffic from a TOML file, one table for each:
#
# [chat]
# share = 3                 # relative to the others'; 1 when absent
# priority = "interactive"  # standard when absent
# tenant = "a"
# input_tokens = "lognormal:300:0.8"
# output_tokens = 128       # a number, or a distribution as in the flags
# ttft_ms = 300             # objectives of its own; those that are absent are the common ones
# tpot_ms = 40


_LENGTHS = ("input_tokens", "output_tokens")
_BOUNDS = ("ttft_ms", "tpot_ms", "e2e_ms")
_KNOWN = ("share", "priority", "tenant", *_LENGTHS, *_BOUNDS)


def read_mix(path: str) -> tuple[tuple[TrafficClass, ...], dict[str, Objectives]]:
    """Return the classes, and the objectives of those that name some. Raises ValueError: file, class and field."""
    try:
        tables = tomllib.loads(Path(path).read_text(encoding="utf-8"))
        if not tables:
            raise ValueError("holds no class of traffic")
        classes = tuple(_traffic(name, table) for name, table in tables.items())
        return classes, {name: _objectives(name, table) for name, table in tables.items() if set(table) & set(_BOUNDS)}
    except (OSError, ValueError) as error:
        raise ValueError(f"mix: {path}: {error}") from error


def _traffic(name: str, table: object) -> TrafficClass:
    if not isinstance(table, dict):
        raise ValueError(f"{name}: must be a table")
    unknown = sorted(set(table) - set(_KNOWN))
    if unknown:
        raise ValueError(f"{name}: unknown field {unknown[0]!r}; known are {', '.join(_KNOWN)}")
    priority = table.get("priority", "standard")
    known = [member.value for member in Priority]
    if priority not in known:
        raise ValueError(f"{name}.priority: must be one of {', '.join(known)}, not {priority!r}")
    tenant = table.get("tenant", "")
    if not isinstance(tenant, str):
        raise ValueError(f"{name}.tenant: must be text, not {tenant!r}")
    given = {field: _distribution(name, field, table[field]) for field in _LENGTHS if field in table}
    share = _positive(name, table, "share") if "share" in table else 1.0
    return TrafficClass(name=name, share=share, priority=priority, tenant=tenant, **given)


def _objectives(name: str, table: Mapping[str, object]) -> Objectives:
    return Objectives(**{field: _positive(name, table, field) for field in _BOUNDS if field in table})


def _distribution(name: str, field: str, value: object) -> Distribution:
    try:
        return parse(str(value))
    except ValueError as error:
        raise ValueError(f"{name}.{field}: {error}") from None


def _positive(name: str, table: Mapping[str, object], field: str) -> float:
    value = table[field]
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise ValueError(f"{name}.{field}: must be a number above 0, not {value!r}")
    return float(value)
