"""Clients that answer for each request: a child process asks the cases one by one, and tells what it saw."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.harness import Figure, say
from benchmarks.peers.environments import PeerError, child_environment, ensure_environment
from pdmesh.client.client import Client
from tests.equality.prompts import SHORT
from tests.interop.cases import Case, Outcome
from tests.interop.catalogue import REFERENCE, ClientUnderTest
from tests.interop.records import Record, Records, ms, timing
from tests.interop.site import Site

MAX_TOKENS = 48
CASES = tuple(Case(content, max_tokens=MAX_TOKENS, seed=number, temperature=0.8) for number, content in enumerate(SHORT))
LEFT = Case("Tell a long story.", max_tokens=2000, seed=0, temperature=0.8, leave=True)
RUN_TIMEOUT_S, IDLE_TIMEOUT_S, IDLE_GOAL_S = 600.0, 30.0, 1.0


@dataclass(frozen=True)
class Run:
    """Outcomes of a client and the mesh's records of the same requests, in order; seconds until the mesh was idle after it had
    left in the middle of an answer; `problem` if it could not take part."""

    outcomes: tuple[Outcome, ...] = ()
    records: tuple[Record, ...] = ()
    idle_s: float = 0.0
    problem: str = ""


def run(client: ClientUnderTest, site: Site, records: Records) -> Run:
    """All cases through one client."""
    try:
        python = ensure_environment(client.environment, say) if client.environment else Path(sys.executable)
        with client.gateway(site) as address:
            records.new()
            outcomes = _ask(python, client.module, address, site.model)
            seen = records.new()
            idle_s = _idle_after(site.router)
    except PeerError as error:
        return Run(problem=str(error))
    return Run(tuple(outcomes[1:]), seen[1:], idle_s)  # the first request of a child is not counted


def _idle_after(router: str) -> float:
    """Seconds until no request runs; the gateway, if there is one, lives on."""
    began = time.monotonic()
    with Client(router) as client:
        while client.status(timeout=5).num_inflight:
            if time.monotonic() - began > IDLE_TIMEOUT_S:
                raise PeerError(f"a request that its client has left still runs after {IDLE_TIMEOUT_S:g} s")
            time.sleep(0.005)
    return time.monotonic() - began


def _ask(python: Path, module: str, address: str, model: str) -> list[Outcome]:
    options = {"address": address, "model": model, "cases": [asdict(case) for case in (*CASES, LEFT)]}
    done = subprocess.run(
        [str(python), "-m", module, json.dumps(options)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=RUN_TIMEOUT_S,
        env=child_environment(),
        check=False,
    )
    if done.returncode:
        raise PeerError(f"ended with code {done.returncode}: {done.stderr[-300:]}")
    return [Outcome(**json.loads(line)) for line in done.stdout.splitlines()]


def figures_of(name: str, runs: Sequence[Run], expected: Sequence[str]) -> list[Figure]:
    """Of all rounds of one client; `expected` are the reference's texts of one round."""
    problem = next((run.problem for run in runs if run.problem), "")
    if problem:
        return [Figure(f"{name}: requests completed", f"none: {problem}", "", "higher", goal=len(expected) * len(runs))]
    outcomes = [outcome for run in runs for outcome in run.outcomes]
    records = [record for run in runs for record in run.records]
    for error in sorted({outcome.error for outcome in outcomes if outcome.error}):
        say(f"{name}: {error}")
    complete = [outcome for outcome in outcomes if not outcome.error]
    equal = sum(_same(run.outcomes[number].text, text) for run in runs for number, text in enumerate(expected))
    total = len(expected) * len(runs)
    idle_s = statistics.median(run.idle_s for run in runs)
    return [
        Figure(f"{name}: requests completed", len(complete), f"of {total}", "higher", goal=total),
        Figure(f"{name}: answers equal to those of {REFERENCE.name}", equal, f"of {total}", "higher", goal=total),
        Figure(f"{name}: mesh idle after the client left in mid-answer", ms(idle_s), "ms", "lower", goal=ms(IDLE_GOAL_S)),
        *(_timings(name, complete, records) if complete and records else ()),
    ]


def _same(text: str, expected: str) -> bool:
    """The same, but for a last character of which max_tokens cut bytes off: some leave it out, some show U+FFFD."""
    return text.rstrip("\ufffd") == expected.rstrip("\ufffd")


def _timings(name: str, outcomes: Sequence[Outcome], records: Sequence[Record]) -> list[Figure]:
    first_s, tpot_s = (statistics.median(values) for values in zip(*((o.first_s, o.tpot_s) for o in outcomes), strict=True))
    return [
        timing(f"{name}: TTFT", first_s, [record.ttft_s for record in records]),
        timing(f"{name}: TPOT", tpot_s, [record.tpot_s for record in records]),
    ]
