"""Whether every span of a request arrives, below the parent that it belongs to: for each kind of course that one may take."""

from __future__ import annotations

import asyncio
import signal
import statistics
from collections.abc import AsyncIterator, Mapping, Sequence, Set
from dataclasses import dataclass

from benchmarks.harness import Figure, say
from pdmesh.client.client import AsyncClient
from pdmesh.client.types import Completed, Delta, Generation
from tests.support.otlp_receiver import Received
from tests.support.traced_mesh import DECODES, PREFILLS, ROUTERS, TIMEOUT_S, Traced, unseen
from tests.support.traces import LOCAL_SPANS, REMOTE_SPANS, Trace, trace_so_far

# Whether the parts of the time to the first token add up to it, for each of many requests under load.


AT_ONCE = 8
MOST_SHARE, MOST_MS = 0.02, 1.0
"""That may be missing: whichever is more."""


async def under_load(traced: Traced, client: AsyncClient, num_requests: int) -> list[tuple[Generation, Trace]]:
    """Prompts of many lengths, separated and not, `AT_ONCE` at a time; each answer with its trace, which is complete."""
    gate = asyncio.Semaphore(AT_ONCE)

    async def one(number: int) -> tuple[Generation, Trace]:
        async with gate:
            mode = ("remote", "local")[number % 2]
            result = await traced.ask(client, mode, length=40 + 13 * (number % 17), max_tokens=4)
        return result, await traced.trace(result.request_id, REMOTE_SPANS if mode == "remote" else LOCAL_SPANS)

    return await asyncio.gather(*(one(number) for number in range(num_requests)))


def may_miss_ms(ttft_ms: float) -> float:
    """So much of it may be in no part."""
    return max(MOST_MS, MOST_SHARE * ttft_ms)


def parts_figures(traces: Sequence[Trace]) -> list[Figure]:
    """Of all of them. Pure."""
    missing = {trace: abs(trace.missing_ms) for trace in traces}
    share = sum(ms <= may_miss_ms(trace.ttft_ms) for trace, ms in missing.items()) / len(traces)
    worst = max(missing, key=lambda trace: missing[trace])
    relative = max(ms / trace.ttft_ms for trace, ms in missing.items())
    of = f"{len(traces)} requests, {AT_ONCE} at a time, half of them separated"
    limits = f"requests whose parts of TTFT add up to it within {MOST_SHARE:.0%} or {MOST_MS:g} ms"
    return [
        Figure(limits, round(share, 4), "share", "higher", goal=1.0, peer=of),
        Figure("the most that is missing of a TTFT", round(missing[worst], 3), "ms", "lower", peer=f"of {worst.ttft_ms:.1f} ms"),
        Figure("the most that is missing, of its TTFT", round(100 * relative, 3), "%", "lower"),
    ]


# What a delay in one phase of a request does to the durations of all of them.


DELAY_MS = 50
LENGTH, NUM_TOKENS = 20, 3
"""Of the prompts: one step each. Of the answers."""


@dataclass(frozen=True)
class Delay:
    """`point`: a failpoint of these processes, within the phase that `part` is the duration of."""

    part: str
    processes: tuple[str, ...]
    point: str


DELAYS = (
    Delay("route", ROUTERS, "router.route"),
    Delay("admission", ROUTERS, "router.admission"),
    Delay("reserve", DECODES, "decode.reserved"),
    Delay("prefill.queue", PREFILLS, "prefill.accepted"),
    Delay("prefill.compute", PREFILLS, "engine.compute"),
    Delay("first_token_return", ROUTERS, "router.first_token"),
    Delay("kv.exposed", PREFILLS, "push.before_commit"),
    Delay("decode.queue", DECODES, "engine.step"),
)
Parts = Mapping[str, float]
"""Milliseconds by name."""


async def moved(traced: Traced, client: AsyncClient, delay: Delay, repeats: int = 5) -> dict[str, float]:
    """By how much each part is longer with the delay than just before without it: the median of a few pairs."""
    request_ids: list[str] = []
    for _ in range(repeats):
        request_ids.append(await _asked(traced, client))
        traced.arm(delay.processes, delay.point, f"delay:{DELAY_MS}")
        request_ids.append(await _asked(traced, client))
        traced.disarm()
    parts = await _parts(traced, request_ids)
    pairs = list(zip(parts[::2], parts[1::2], strict=True))
    return {name: statistics.median(after[name] - before[name] for before, after in pairs) for name in parts[0]}


async def medians(traced: Traced, client: AsyncClient, repeats: int = 5) -> dict[str, float]:
    """Of a few requests, one after the other."""
    parts = await _parts(traced, [await _asked(traced, client) for _ in range(repeats)])
    return {name: statistics.median(each[name] for each in parts) for name in parts[0]}


async def _asked(traced: Traced, client: AsyncClient) -> str:
    """One separated request, until it is answered; its id."""
    return (await traced.ask(client, length=LENGTH, max_tokens=NUM_TOKENS)).request_id


async def _parts(traced: Traced, request_ids: Sequence[str]) -> list[Parts]:
    traces = await asyncio.gather(*(traced.trace(each, REMOTE_SPANS) for each in request_ids))
    return [trace.ttft_parts_ms() | trace.gap_parts_ms() for trace in traces]


async def delay_figures(traced: Traced, client: AsyncClient, repeats: int) -> list[Figure]:
    """Two for each delay: its own part, and the other one that moved most."""
    found: list[Figure] = []
    for delay in DELAYS:
        parts = await moved(traced, client, delay, repeats)
        found += figures_of(delay, parts)
    return found


def figures_of(delay: Delay, parts: Parts) -> list[Figure]:
    """`parts`: by how much each moved. Pure."""
    other = max((name for name in parts if name != delay.part), key=lambda name: abs(parts[name]))
    name = f"{DELAY_MS} ms in {delay.part}"
    return [
        Figure(f"{name}: it is longer by", round(parts[delay.part], 2), "ms", "higher", goal=0.9 * DELAY_MS),
        Figure(f"{name}: another moves by at most", round(abs(parts[other]), 2), "ms", "lower", goal=DELAY_MS / 2, peer=other),
    ]


ROOT = "generate@router"
ATTEMPT = f"{ROOT}/attempt@router"
_PREFILL = f"{ATTEMPT}/prefill@router/prefill@prefill"
_DECODE = f"{ATTEMPT}/decode@decode"
_ALWAYS = frozenset(
    {
        ROOT, f"{ROOT}/route@router", f"{ROOT}/admission@router", f"{ROOT}/first_token_return@router",
        ATTEMPT, f"{ATTEMPT}/reserve@router", f"{ATTEMPT}/reserve@router/submit@decode", _DECODE,
    }
)  # fmt: skip
REMOTE = _ALWAYS | {
    f"{ATTEMPT}/prefill@router", _PREFILL, f"{_PREFILL}/prefill.queue@prefill", f"{_PREFILL}/prefill.compute@prefill",
    f"{_PREFILL}/kv.push@prefill", f"{_PREFILL}/kv.exposed@prefill", f"{_DECODE}/decode.queue@decode",
}  # fmt: skip
LOCAL = _ALWAYS | {f"{_DECODE}/prefill.queue@decode", f"{_DECODE}/prefill.compute@decode"}
# The attempt that failed has what the one behind it has, as far as it came: the same paths.
RETRIED = _ALWAYS | {f"{ROOT}/retry@router", f"{ATTEMPT}/prefill@router", _PREFILL}
_MOVE = f"{ROOT}/migrate@router"
MOVED = REMOTE | {_MOVE, f"{_MOVE}/attempt@router", f"{_MOVE}/attempt@router/reserve@router",
                  f"{_MOVE}/attempt@router/reserve@router/submit@decode", f"{_MOVE}/attempt@router/decode@decode"}  # fmt: skip
STEP = "a link from decode.step"
PATIENCE_S = 20.0
NUM_MOVED_TOKENS = 120
STEP_DELAY_MS = 20
"""Of a request that is to move: else it might be through before."""


@dataclass(frozen=True)
class Kind:
    """Requests that take the same course: their ids, and the paths that each one's spans have to have."""

    name: str
    request_ids: Sequence[str]
    wanted: Set[str]


async def kinds(traced: Traced, client: AsyncClient, num_each: int) -> AsyncIterator[Kind]:
    """Each as soon as its requests are through; the last one restarts a worker."""
    yield Kind("separated", await _ask(traced, client, "remote", num_each), REMOTE)
    yield Kind("LOCAL", await _ask(traced, client, "local", num_each), LOCAL)
    yield Kind("tried again", await _retried(traced, client, max(1, num_each // 4)), RETRIED)
    yield Kind("moved while it runs", await _moved(traced, client, max(1, num_each // 20)), MOVED)


async def figures(traced: Traced, client: AsyncClient, num_each: int) -> list[Figure]:
    """One for each kind, and one for all of them."""
    found: list[Figure] = []
    num_whole = num_all = 0
    async for kind in kinds(traced, client, num_each):
        whole = [not lacking for lacking in [await missing(traced, each, kind.wanted) for each in kind.request_ids]]
        found.append(_share(f"requests whose spans are all there, below their parents: {kind.name}", sum(whole), len(whole)))
        num_whole, num_all = num_whole + sum(whole), num_all + len(whole)
    return [*found, _share("requests whose spans are all there, below their parents", num_whole, num_all)]


def _share(name: str, count: int, of: int) -> Figure:
    return Figure(name, round(count / of, 4), "share", "higher", goal=1.0, peer=f"{of} requests")


async def missing(traced: Traced, request_id: str, wanted: Set[str]) -> Set[str]:
    """What has not arrived, though it was waited for."""

    def lacking(spans: Sequence[Received]) -> Set[str]:
        trace = trace_so_far(spans, request_id)
        return {"all of it"} if trace is None else lacks(trace, spans, wanted)

    try:
        await asyncio.to_thread(traced.receiver.wait, lambda spans: not lacking(spans), PATIENCE_S)
    except AssertionError:
        found = lacking(traced.receiver.spans)
        say(f"{request_id}: missing: {', '.join(sorted(found))}")
        return found
    return frozenset()


def lacks(trace: Trace, spans: Sequence[Received], wanted: Set[str]) -> Set[str]:
    """Of one trace among all spans. A span whose parent is not there (yet) has no path. Pure."""
    paths = {path for span in trace.spans if (path := trace.path(span)) is not None}
    linked = {link for span in spans if span.name == "decode.step" for link in span.links}
    decodes = {(span.trace_id, span.span_id) for span in trace.all("decode")}
    return (wanted - paths) | (set() if decodes <= linked else {STEP})


async def _ask(traced: Traced, client: AsyncClient, mode: str, count: int) -> list[str]:
    results = await asyncio.gather(*(traced.ask(client, mode, length=60) for _ in range(count)))
    return [result.request_id for result in results]


async def _retried(traced: Traced, client: AsyncClient, count: int) -> list[str]:
    """The first prefill worker that is asked refuses; while routers leave out those that refused before, nobody is."""
    request_ids: list[str] = []
    async with asyncio.timeout(TIMEOUT_S):
        while len(request_ids) < count:
            traced.arm(PREFILLS, "prefill.accepted", "error@1")
            result = await traced.ask(client, length=60)
            traced.disarm()
            if result.timings.num_retries:
                request_ids.append(result.request_id)
            else:
                await asyncio.sleep(0.5)
    return request_ids


async def _moved(traced: Traced, client: AsyncClient, count: int) -> list[str]:
    return [(await moved_one(traced, client)).request_id for _ in range(count)]


@dataclass(frozen=True)
class Moved:
    """A request that was at the worker `left` when that was told to stop, and was finished by another."""

    request_id: str
    left: str
    finished_by: str


async def moved_one(traced: Traced, client: AsyncClient) -> Moved:
    """Nothing else may run. Returns when the worker is back."""
    traced.arm(DECODES, "engine.step", f"delay:{STEP_DELAY_MS}")
    request_id, left, finished_by = f"r{next(traced.numbers)}", "", ""
    stream = client.generate_stream(
        unseen(int(request_id[1:]), 60), mode="remote", max_tokens=NUM_MOVED_TOKENS, ignore_eos=True, temperature=0,
        request_id=request_id, timeout=TIMEOUT_S,
    )  # fmt: skip
    async with stream:
        async for event in stream:
            if isinstance(event, Delta) and event.first_index and not left:
                left = await _holder(client)
                traced.mesh.kill(left, signal.SIGTERM)
            if isinstance(event, Completed):
                finished_by = event.timings.decode_worker
    traced.disarm()
    await traced.mesh.wait_ready(TIMEOUT_S)
    return Moved(request_id, left, finished_by)


async def _holder(client: AsyncClient) -> str:
    """The decode worker that runs something."""
    async with asyncio.timeout(TIMEOUT_S):
        while True:
            for worker in (await client.status(timeout=10)).workers:
                if worker.info.worker_id in DECODES and worker.load.num_running:
                    return worker.info.worker_id
            await asyncio.sleep(0.02)
