"""What a router adds to the time of a first token, to the CPU time of a token, to memory: `python -m benchmarks.router.overhead`.

The workers behind it answer at once (`stub_worker.py`), so that what is left is the router and one or two calls over loopback.
All are processes of their own. Rounds are interleaved and figures are medians over them, but for the percentiles, which are of
all requests together.

    TTFT    open loop at half of the router's capacity, less the same percentile of a server that answers by itself (`peer.py`);
            `limit`: the same of a process that only makes the router's calls (`peer.py --workers`)
    CPU     of the router's process per message of one token, over that of an empty stream in a process of its own
    idle    resident memory of the router's process with many streams that have had their first token
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness import Figure, Process, parser_of, running, say, show
from benchmarks.router.stub_worker import MAX_CONTEXT
from tests.support.tiny_models import write_byte_tokenizer

STREAMS = 32
STEP_S = 0.02
"""Each stream gets 50 tokens/s."""
ENDLESS = 100_000
CLIENT = "benchmarks.router.client"
PEER = "benchmarks.router.peer"


@dataclass(frozen=True)
class Scale:
    """How much is measured. `window_s`: one measurement of one process."""

    rounds: int = 5
    window_s: float = 4.0
    idle_streams: int = 10_000


QUICK = Scale(rounds=2, window_s=1.0, idle_streams=500)


def figures(*, quick: bool) -> list[Figure]:
    """Everything; about four minutes, or twenty seconds."""
    scale = QUICK if quick else Scale()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(folder)
        return [
            *ttft_figures(folder, scale, "remote"),
            *ttft_figures(folder, scale, "local"),
            *cpu_figures(folder, scale),
            *idle_figures(folder, scale),
        ]


def write_model(folder: Path) -> None:
    """The byte tokenizer and what a router reads of config.json."""
    write_byte_tokenizer(folder, max_context=MAX_CONTEXT)
    config = {"vocab_size": 320, "max_position_embeddings": MAX_CONTEXT, "eos_token_id": 258}
    (folder / "config.json").write_text(json.dumps(config))


def ttft_figures(folder: Path, scale: Scale, mode: str) -> list[Figure]:
    """Added TTFT, REMOTE (Submit, then Prefill) or LOCAL (Submit alone)."""
    routed, direct, relayed = list[float](), list[float](), list[float]()
    with router(folder) as (process, address), _peer() as (_, peer_address), _relay(mode) as relay_address:
        capacity = find_capacity(process, address, mode, scale.window_s)
        say(f"{mode}: capacity {capacity:.0f} requests/s")
        for _ in range(scale.rounds):
            routed += paced(address, mode, capacity / 2, scale.window_s)
            direct += paced(peer_address, mode, capacity / 2, scale.window_s)
            relayed += paced(relay_address, mode, capacity / 2, scale.window_s)
    alone = f"p50 {1e3 * quantile(direct, 0.5):.2f}, p99 {1e3 * quantile(direct, 0.99):.2f} ms"
    peer = f"the same stream from a grpc.aio server alone: {alone}"
    return [
        Figure(f"router capacity, {mode} prefill, 128 tokens in, 8 out", round(capacity, 1), "requests/s", "higher"),
        _added(mode, 0.5, 1.0, (routed, relayed, direct), peer),
        _added(mode, 0.99, 3.0, (routed, relayed, direct), peer),
    ]


def _added(mode: str, share: float, goal: float, ttft_s: tuple[Sequence[float], ...], peer: str) -> Figure:
    """`ttft_s`: of the router, of the relay and of the peer, which is taken from both."""
    ours, limit, alone = (1e3 * quantile(values, share) for values in ttft_s)
    name = f"added TTFT p{round(100 * share)}, {mode} prefill, half of capacity"
    return Figure(name, round(ours - alone, 3), "ms", "lower", goal=goal, limit=round(limit - alone, 3), peer=peer)


def find_capacity(process: Process, address: str, mode: str, seconds: float) -> float:
    """Requests/s at which the router's process has one core's worth of work: the rate of a closed loop over its share of a core.

    Client and workers take turns with it on the same cores, so that the closed loop alone would measure all three."""
    with running(CLIENT, "closed", "--address", address, "--mode", mode, "--seconds", seconds, "--count", 64) as client:
        began_s, began = process.cpu_s, time.perf_counter()
        rate: float = client.hear()["requests_per_s"]
        busy = (process.cpu_s - began_s) / (time.perf_counter() - began)
    return rate / min(1.0, busy)


def paced(address: str, mode: str, rate: float, seconds: float) -> list[float]:
    """TTFT of each request, in seconds."""
    with running(CLIENT, "paced", "--address", address, "--mode", mode, "--rate", rate, "--seconds", seconds) as client:
        ttft_s: list[float] = client.hear()["ttft_s"]
        return ttft_s


def cpu_figures(folder: Path, scale: Scale) -> list[Figure]:
    """CPU time of a token, of the router and of both peers."""
    samples: dict[str, list[float]] = {"router": [], "one clock": [], "own timers": []}
    with router(folder, step_s=STEP_S) as behind, _peer(STEP_S) as clocked, _peer(STEP_S, "--own-timers") as timed:
        for _ in range(scale.rounds):
            for name, (process, address) in zip(samples, (behind, clocked, timed), strict=True):
                samples[name].append(cpu_per_token(process, address, scale.window_s))
                say(f"{name}: {samples[name][-1]:.1f} us of CPU per token")
    ours, *peers = (statistics.median(values) for values in samples.values())
    return [
        Figure("CPU per streamed token, 32 streams of 50/s", round(ours, 1), "us", "lower"),
        _ratio(ours, peers[0], "an empty grpc.aio stream, 32 of them woken by one clock"),
        _ratio(ours, peers[1], "an empty grpc.aio stream with a timer of its own"),
    ]


def _ratio(ours: float, theirs: float, peer: str) -> Figure:
    name = f"CPU per streamed token over that of {peer}"
    return Figure(name, round(ours / theirs, 2), "x", "lower", goal=1.3, peer=f"{peer}: {theirs:.1f} us")


def cpu_per_token(process: Process, address: str, seconds: float) -> float:
    """Microseconds of CPU time of `process` for each message that its 32 streams get."""
    with streams(address, STREAMS) as client:
        time.sleep(0.3)  # what opening them has left behind
        before, began_s = client.ask()["messages"], process.cpu_s
        time.sleep(seconds)
        after, ended_s = client.ask()["messages"], process.cpu_s
    return 1e6 * (ended_s - began_s) / int(after - before)


def idle_figures(folder: Path, scale: Scale) -> list[Figure]:
    """Memory of streams that have had their first token and wait for the next, 100 on each connection."""
    with router(folder, hold_after=1) as (process, address):
        before = process.rss_bytes
        with streams(address, scale.idle_streams) as client:
            time.sleep(1.0)
            running_streams = client.ask()["running"]
            after = process.rss_bytes
    if running_streams != scale.idle_streams:
        raise RuntimeError(f"{running_streams} of {scale.idle_streams} streams are open")
    goal = 1.0 if scale.idle_streams >= Scale().idle_streams else None
    each_kib = (after - before) / scale.idle_streams / 1024
    return [
        Figure(f"resident memory with {scale.idle_streams} idle streams", round(after / 2**30, 3), "GiB", "lower", goal=goal),
        Figure("resident memory of an idle stream", round(each_kib, 1), "KiB", "lower"),
    ]


@contextmanager
def router(
    folder: Path,
    *,
    step_s: float = 0.0,
    hold_after: int | None = None,
    profile: Path | None = None,
    settings: Sequence[object] = (),
) -> Iterator[tuple[Process, str]]:
    """A router process before two stub workers; its address. With `profile` it samples itself into that file."""
    hold = () if hold_after is None else ("--hold-after", hold_after)
    program = ("router",) if profile is None else ("benchmarks.router.profiled", profile)
    with running("benchmarks.router.stub_worker", "--step-s", step_s, *hold) as workers:
        addresses = workers.hear()["address"]
        flags = ("--port", 0, "--models", f"stub={folder}", "--workers", addresses, "--max-inflight", 1_000_000)
        with running(str(program[0]), *program[1:], *flags, *settings) as process:
            yield process, process.hear()["address"]


@contextmanager
def streams(address: str, count: int) -> Iterator[Process]:
    """A client whose streams have all begun."""
    with running(CLIENT, "streams", "--address", address, "--count", count, "--max-tokens", ENDLESS) as client:
        client.hear()
        yield client


@contextmanager
def _relay(mode: str) -> Iterator[str]:
    with ExitStack() as started:
        workers = started.enter_context(running("benchmarks.router.stub_worker")).hear()["address"]
        relay = started.enter_context(running("benchmarks.router.peer", "--workers", workers, "--mode", mode))
        yield relay.hear()["address"]


@contextmanager
def _peer(step_s: float = 0.0, *flags: str) -> Iterator[tuple[Process, str]]:
    with running(PEER, "--step-s", step_s, *flags) as process:
        yield process, process.hear()["address"]


def quantile(values: Sequence[float], share: float) -> float:
    """By rank."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


if __name__ == "__main__":
    parser = parser_of("benchmarks.router.overhead", __doc__)
    parser.add_argument("--quick", action="store_true", help="twenty seconds; the numbers are rough")
    show(figures(quick=parser.parse_args().quick))
