"""`make bench-clients`: each client completes, gets the answers that pdmesh's own client gets, and sees the mesh's own timings.

One request at a time, streamed. The goal for TTFT and TPOT is what the mesh recorded of the same requests plus 5 % or 2 ms,
whichever is more: what lies between is the client's protocol, its gateway and the loopback.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

from benchmarks.clients.cases import Case, Outcome
from benchmarks.clients.catalogue import CLIENTS, REFERENCE, ClientUnderTest
from benchmarks.clients.recording_router import FILE_VARIABLE
from benchmarks.harness import Figure, say, write
from benchmarks.peers.environments import PeerError, child_environment, ensure_environment
from benchmarks.prompts import SHORT
from pdmesh.client import Client
from pdmesh.launcher import LocalMesh
from pdmesh.launcher_plan import LocalMeshConfig, ProcessPlan
from pdmesh.models import ensure_model

CASES = tuple(Case(content, max_tokens=48, seed=number, temperature=0.8) for number, content in enumerate(SHORT))
LEFT = Case("Tell a long story.", max_tokens=2000, seed=0, temperature=0.8, leave=True)
ROUNDS = 3
RUN_TIMEOUT_S, IDLE_TIMEOUT_S, IDLE_GOAL_S = 600.0, 30.0, 1.0
SHARE, AT_LEAST_S = 0.05, 0.002


@dataclass(frozen=True)
class Run:
    """Outcomes of a client and the mesh's records of the same requests, in order; seconds until the mesh was idle after it had
    left in the middle of an answer; `problem` if it could not take part."""

    outcomes: tuple[Outcome, ...] = ()
    records: tuple[dict[str, float], ...] = ()
    idle_s: float = 0.0
    problem: str = ""


class Bench:
    """A running mesh and the file that its router records into."""

    def __init__(self, router: str, model: str, records: Path) -> None:
        self._router, self._model, self._records = router, model, records

    async def run(self, client: ClientUnderTest) -> Run:
        """All cases through one client."""
        try:
            return await asyncio.to_thread(self._prepare_and_run, client)
        except PeerError as error:
            return Run(problem=str(error))

    def _prepare_and_run(self, client: ClientUnderTest) -> Run:
        python = ensure_environment(client.environment, say) if client.environment else Path(sys.executable)
        with client.gateway(self._router) as address:
            seen = len(self._read())
            outcomes = self._ask(python, client.module, address)
            records = self._read()[seen:]
            idle_s = self._idle_after()
        return Run(tuple(outcomes[1:]), tuple(records[1:]), idle_s)  # the first request of a child is not counted

    def _idle_after(self) -> float:
        """Seconds until no request runs; the gateway, if there is one, lives on."""
        began = time.monotonic()
        with Client(self._router) as client:
            while client.status(timeout=5).num_inflight:
                if time.monotonic() - began > IDLE_TIMEOUT_S:
                    raise PeerError(f"a request that its client has left still runs after {IDLE_TIMEOUT_S:g} s")
                time.sleep(0.005)
        return time.monotonic() - began

    def _ask(self, python: Path, module: str, address: str) -> list[Outcome]:
        options = {"address": address, "model": self._model, "cases": [asdict(case) for case in (*CASES, LEFT)]}
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

    def _read(self) -> list[dict[str, float]]:
        return [json.loads(line) for line in self._records.read_text().splitlines()]


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
    return [
        Figure(f"{name}: requests completed", len(complete), f"of {total}", "higher", goal=total),
        Figure(f"{name}: answers equal to those of {REFERENCE.name}", equal, f"of {total}", "higher", goal=total),
        Figure(
            f"{name}: mesh idle after the client left in mid-answer",
            _ms(statistics.median(run.idle_s for run in runs)),
            "ms",
            "lower",
            goal=_ms(IDLE_GOAL_S),
        ),
        *_timing(f"{name}: TTFT", complete, records, lambda outcome: outcome.first_s, "ttft_s"),
        *_timing(f"{name}: TPOT", complete, records, lambda outcome: outcome.tpot_s, "tpot_s"),
    ]


def _same(text: str, expected: str) -> bool:
    """The same, but for a last character of which max_tokens cut bytes off: some leave it out, some show U+FFFD."""
    return text.rstrip("\ufffd") == expected.rstrip("\ufffd")


def _timing(
    name: str, outcomes: Sequence[Outcome], records: Sequence[dict[str, float]], read: Callable[[Outcome], float], key: str
) -> list[Figure]:
    if not outcomes or not records:
        return []
    seen = statistics.median(read(outcome) for outcome in outcomes)
    own = statistics.median(record[key] for record in records)
    goal = own + max(AT_LEAST_S, own * SHARE)
    return [Figure(name, _ms(seen), "ms", "lower", goal=_ms(goal), peer=f"the mesh's own record of it: {_ms(own)} ms")]


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)


def recording(plan: ProcessPlan, records: Path) -> ProcessPlan:
    """A router's process with the recording one in its place; others as they are."""
    if plan.is_worker:
        return plan
    argv = (*plan.argv[:2], "benchmarks.clients.recording_router", *plan.argv[3:])  # python -m router …
    return replace(plan, argv=argv, env={**plan.env, FILE_VARIABLE: str(records)})


async def main() -> None:
    folder = ensure_model("smollm2-135m-instruct", say)
    with tempfile.TemporaryDirectory(prefix="bench-clients-") as temporary:
        records = Path(temporary) / "records.jsonl"
        records.touch()
        config = LocalMeshConfig(
            model=str(folder), port=0, worker_args=("--kv-memory-mb", "512"), adjust=partial(recording, records=records)
        )
        async with LocalMesh(config, on_event=say) as mesh:
            bench = Bench(mesh.router_address, config.name_of_model, records)
            runs: dict[str, list[Run]] = {client.name: [] for client in CLIENTS}
            for number in range(ROUNDS):
                for client in CLIENTS:
                    run = await bench.run(client)
                    runs[client.name].append(run)
                    say(f"round {number + 1}/{ROUNDS}  {client.name}: {run.problem or f'{len(run.outcomes)} requests'}")
    expected = [outcome.text for outcome in runs[REFERENCE.name][0].outcomes]
    figures = [figure for client in CLIENTS for figure in figures_of(client.name, runs[client.name], expected)]
    load = f"{len(CASES)} chats, one at a time, {CASES[0].max_tokens} tokens each"
    write("clients", figures, model=config.name_of_model, load=load)


if __name__ == "__main__":
    asyncio.run(main())
