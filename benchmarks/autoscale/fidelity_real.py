"""A real mesh of this machine under given arrivals: what each request took, and what the workers said of themselves meanwhile."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path

from benchmarks.autoscale.fidelity_runs import PARTS, Passage, Run, SeenWorker
from benchmarks.autoscale.logged_worker import read_steps
from benchmarks.autoscale.scenario import Options
from benchmarks.harness import MODEL, say
from benchmarks.router.meshes import Running, Shape, asking, call
from kvtransfer.manifest import DTYPE_BYTES, INT8_SCALE_BYTES
from pdmesh.client.client import AsyncClient
from pdmesh.launcher.mesh import LocalMesh
from pdmesh.launcher.plan import ProcessPlan
from pdmesh.loadtest.record import Objectives, Outcome, Record
from pdmesh.loadtest.runner import Runner, RunSettings
from pdmesh.loadtest.targets.grpc import GrpcSettings, GrpcTarget
from pdmesh.loadtest.workload import PlannedSession, PlannedTurn, Segment, TrafficClass
from pdmesh.simulator.arrivals import Arrival
from pdmesh.v1 import mesh_pb2, worker_pb2

TTFT_MS, TPOT_MS = 3000, 60
LOOK_PERIOD_S = 0.5


@dataclass
class Look:
    """What workers have said, look by look."""

    status: mesh_pb2.GetStatusResponse | None = None
    models: dict[str, list[tuple[float, ...]]] = field(default_factory=dict)

    def add(self, status: mesh_pb2.GetStatusResponse) -> None:
        self.status = status
        for worker in status.workers:
            if worker.alive and worker.load.HasField("latency_model"):
                self.models.setdefault(worker.info.worker_id, []).append(_prices(worker.load.latency_model))

    def workers(self) -> list[SeenWorker]:
        """Raises ValueError where one has said nothing."""
        if self.status is None or len(self.models) != len(self.status.workers):
            raise ValueError("a worker has not said how fast it is: the run is too short, or the mesh does not serve")
        return [_worker(one, self.models[one.info.worker_id]) for one in self.status.workers]


def _prices(said: worker_pb2.LatencyModel) -> tuple[float, ...]:
    return (
        said.fixed_s,
        said.per_prefill_token_s,
        said.per_prefill_context_s,
        said.per_sequence_s,
        said.per_context_token_s,
        said.prefill_error,
        said.decode_error,
        said.num_steps,
    )


def _worker(worker: mesh_pb2.WorkerStatus, models: Sequence[tuple[float, ...]]) -> SeenWorker:
    info, roles = worker.info, worker.load.roles
    sizes = {
        "max_num_batched_tokens": info.max_num_batched_tokens,
        "max_num_seqs": info.max_num_seqs,
        "num_blocks": info.num_blocks,
        "block_size": info.layout.block_size,
        "max_context": info.max_context,
        "kv_bytes_per_token": _kv_bytes(info),
    }
    return SeenWorker(
        info.worker_id, worker_pb2.ROLE_PREFILL in roles, worker_pb2.ROLE_DECODE in roles, sizes, [list(one) for one in models]
    )


def _kv_bytes(info: worker_pb2.WorkerInfo) -> int:
    """Of one token: keys and values of all layers."""
    model = info.identity
    scale = INT8_SCALE_BYTES if info.layout.kv_dtype == "int8" else 0
    return 2 * model.num_layers * model.num_kv_heads * (model.head_dim * DTYPE_BYTES[info.layout.kv_dtype] + scale)


@asynccontextmanager
async def started(shape: Shape, options: Options) -> AsyncIterator[Running]:
    """The mesh of this shape, with objectives for its model. Raises StartFailed."""
    folder = options.folder / "fidelity"
    objectives = _objectives(folder)
    shaped = replace(shape, router_args=("--objectives", str(objectives), *shape.router_args))
    config = shaped.config(options)
    config = replace(config, adjust=lambda plan: _logged(plan, folder))
    say(f"{shape.name}: starting")
    async with LocalMesh(config, on_event=say) as mesh, asking(mesh) as target:
        yield Running(shaped, mesh, target)


def _logged(plan: ProcessPlan, folder: Path) -> ProcessPlan:
    """Workers write down their steps."""
    if not plan.is_worker:
        return plan
    python, _, _, *arguments = plan.argv
    return replace(plan, argv=(python, "-m", "benchmarks.autoscale.logged_worker", str(_log(folder, plan.name)), *arguments))


def _log(folder: Path, worker: str) -> Path:
    return folder / f"{worker}.steps"


def _objectives(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "objectives.toml"
    path.write_text(f"[{MODEL}]\nttft_ms = {TTFT_MS}\ntpot_ms = {TPOT_MS}\n")
    return path


async def capacity(system: Running, lengths: Sequence[tuple[int, int]], concurrency: int, seconds: float, seed: int) -> float:
    """Requests a second while so many run at any time. Nobody is refused for being late."""
    began_s, patient = time.monotonic(), Objectives(ttft_ms=60_000, tpot_ms=TPOT_MS)

    async def one_after_the_other(number: int) -> int:
        for turn in count():
            if time.monotonic() - began_s >= seconds:
                return turn
            num_input, num_output = lengths[(number + turn * concurrency) % len(lengths)]
            answer = await call(system.target, f"capacity-{number}-{turn}", num_input, num_output, seed, patient)
            if answer.error:
                raise ValueError(f"a request of few failed: {answer.error}")
        raise AssertionError("there is no end of turns")

    counts = await asyncio.gather(*map(one_after_the_other, range(concurrency)))
    return sum(counts) / (time.monotonic() - began_s)


async def run(system: Running, arrivals: Sequence[Arrival], warmup_s: float, seed: int, options: Options, mode: str = "") -> Run:
    """Asks them, an open loop, and waits for all. `seed`: of the prompts' contents, which no run may share with another. `mode`:
    forced on every request; empty: the policy chooses."""
    target = GrpcTarget(",".join(system.mesh.router_addresses), GrpcSettings(send_objectives=False, mode=mode))
    asking_for = RunSettings(request_id_prefix=f"run-{seed}", seed=seed)
    looking = asyncio.create_task(_look(system.mesh.router_address, warmup_s, arrivals[-1].at_s))
    try:
        log = await Runner(target, asking_for).run(map(_session, enumerate(arrivals)))
        seen = _run(arrivals, log.records, warmup_s, await looking)
        return replace(seen, workers=[_with_steps(worker, log.started_at, warmup_s, options) for worker in seen.workers])
    finally:
        looking.cancel()
        await target.close()


def _with_steps(worker: SeenWorker, began_s: float, from_s: float, options: Options) -> SeenWorker:
    """Of the time in which requests were counted, since the start of the run."""
    steps = read_steps(_log(options.folder / "fidelity", worker.name), began_s + from_s, time.monotonic())
    return replace(worker, steps=[(start - began_s, end - began_s, *work) for start, end, *work in steps])


def _session(numbered: tuple[int, Arrival]) -> PlannedSession:
    number, arrival = numbered
    turn = PlannedTurn(0.0, (Segment(f"prompt-{number}", arrival.num_input),), arrival.num_output)
    return PlannedSession(number, arrival.at_s, TrafficClass(), (turn,))


async def _look(address: str, from_s: float, until_s: float) -> Look:
    """What workers say while requests are counted."""
    look, clock = Look(), asyncio.get_running_loop().time
    began_s = clock()
    async with AsyncClient(address) as client:
        await asyncio.sleep(from_s)
        while clock() - began_s < until_s or not look.models:
            look.add(await client.status(timeout=5.0))
            await asyncio.sleep(LOOK_PERIOD_S)
    return look


def _run(asked: Sequence[Arrival], records: Sequence[Record], from_s: float, look: Look) -> Run:
    """Raises ValueError where a request failed: the runs would not be the same."""
    ordered = sorted(records, key=lambda record: record.sent_s)
    counted = [record for record in ordered if record.sent_s >= from_s]
    failed = [record for record in ordered if record.outcome not in (Outcome.OK, Outcome.REFUSED)]
    if failed:
        raise ValueError(f"{len(failed)} requests failed, the first with: {failed[0].error}")
    arrivals = [(one.sent_s, asked[one.session].num_input, asked[one.session].num_output) for one in ordered]
    passages = [_passage(record) for record in counted if record.outcome is Outcome.OK]
    say(f"{len(passages)} requests were answered, {len(counted) - len(passages)} refused")
    return Run(arrivals, from_s, passages, len(counted) - len(passages), look.workers())


def _passage(record: Record) -> Passage:
    ttft_s = record.ttft_from_sent_s or 0.0
    parts = {name: record.phases_ms.get(name, 0.0) / 1e3 for name in PARTS}
    parts["outside"] = ttft_s - sum(parts[name] for name in PARTS[:7])
    if len(record.token_times) > 1:
        parts["first_gap"] = record.token_times[1] - record.token_times[0]
    return Passage(
        at_s=record.sent_s,
        num_input=record.input_tokens,
        num_output=record.output_tokens,
        ttft_s=ttft_s,
        tpot_s=record.tpot_s or 0.0,
        is_local="→" not in record.workers,
        parts=parts,
    )
