"""CPU time of a decision of the policy in a large fleet: `python -m benchmarks.policy_cost [NUM_WORKERS]` prints JSON lines.

No process is started: views as reports would make them, one decision after another, each counted as load where it went, and
a report of somebody after each.
"""

import json
import random
import time
from dataclasses import replace
from statistics import quantiles

from benchmarks.harness import parser_of
from kvtransfer.layout import EVERYWHERE, Layout, Reach, Scope, Transports
from pdmesh.planning.latency_model import LatencyModel
from pdmesh.v1 import worker_pb2
from router.routing.cost_policy import PredictPolicy
from router.routing.filters import Placement, RoutingRequest
from router.routing.fleet_snapshot import FleetSnapshot
from router.routing.learned import Overheads
from router.routing.worker_reports import Described, snapshot_of
from router.routing.worker_snapshot import WorkerSnapshot

NUM_DECISIONS = 3000
NUM_HOLDERS = 20
IDENTITY, LAYOUT, TRANSPORTS = (
    ("m", "hash"),
    Layout(16, "bfloat16"),
    Transports.of({"wide": EVERYWHERE, "host": Reach(Scope.HOST)}),
)


def view(number: int, draw: random.Random) -> WorkerSnapshot:
    """A third prefill, a third decode, a third both; as loaded as chance has it."""
    rows = draw.randrange(40) if number % 3 else 0
    return WorkerSnapshot(
        worker_id=f"w{number}",
        address=f"10.0.{number >> 8}.{number & 255}:50051",
        epoch=number,
        model="m",
        prefill=number % 3 != 1,
        decode=number % 3 != 0,
        identity=IDENTITY,
        layout=LAYOUT,
        transports=TRANSPORTS,
        host_id=f"host{number // 8}",
        block_size=16,
        max_context=8192,
        max_num_seqs=256,
        num_total_blocks=10_000,
        num_free_blocks=10_000 - 40 * rows,
        num_seqs=rows,
        num_waiting_tokens=draw.randrange(2000) if number % 3 != 1 else 0,
        num_prefilling=1,
        num_decoding=rows,
        decode_context=500 * rows,
        max_num_batched_tokens=2048,
        latency=LatencyModel(5e-3, draw.uniform(2e-5, 3e-5), 1e-9, 1e-5, 1e-8, 1000),
    )


def report(worker: WorkerSnapshot, draw: random.Random) -> worker_pb2.LoadReport:
    """What a worker says next: a little has changed."""
    load = worker_pb2.LoadReport(
        epoch=worker.epoch,
        num_running=worker.num_seqs,
        num_free_blocks=worker.num_free_blocks,
        num_total_blocks=worker.num_total_blocks,
        max_num_seqs=worker.max_num_seqs,
        num_waiting_tokens=draw.randrange(2000) if worker.prefill else 0,
        num_prefilling=1,
        num_decoding=worker.num_decoding,
        decode_context=worker.decode_context + draw.randrange(100),
    )
    load.latency_model.fixed_s, load.latency_model.per_prefill_token_s, load.latency_model.num_steps = 5e-3, 2e-5, 1000
    load.roles.extend([worker_pb2.ROLE_PREFILL] * worker.prefill + [worker_pb2.ROLE_DECODE] * worker.decode)
    return load


def described(worker: WorkerSnapshot) -> Described:
    """The lasting part of the view."""
    same = {name: getattr(worker, name) for name in Described._fields if name not in ("num_blocks", "system_fingerprint")}
    return Described(**same, num_blocks=worker.num_total_blocks)


def main() -> None:
    """Decisions, updates of views, and reports from the parsed message to the updated roster."""
    parser = parser_of("benchmarks.policy_cost", __doc__)
    parser.add_argument("num_workers", nargs="?", type=int, default=3000)
    num_workers: int = parser.parse_args().num_workers
    draw = random.Random(0)
    views = [view(number, draw) for number in range(num_workers)]
    roster, policy = FleetSnapshot(views), PredictPolicy(Overheads(), local_prefill_tokens=32)
    decisions, updates, reports = list[float](), list[float](), list[float]()
    for _ in range(NUM_DECISIONS):
        cached = {views[number].key: 512 for number in draw.sample(range(num_workers), min(NUM_HOLDERS, num_workers))}
        demand = replace(
            RoutingRequest("m", draw.randrange(64, 4000), max_total_tokens=4200), cached_tokens=cached, ttft_goal_s=0.5
        )
        began = time.thread_time_ns()
        choice = policy.choose(roster, demand, 0.0)
        decisions.append((time.thread_time_ns() - began) / 1e3)
        assert isinstance(choice, Placement)
        busier = replace(choice.decode, dispatched_decodes=choice.decode.dispatched_decodes + 1)
        began = time.thread_time_ns()
        roster.put(busier.address, busier)
        updates.append((time.thread_time_ns() - began) / 1e3)
        reporting = draw.choice(views)
        who, load = described(reporting), report(reporting, draw)
        began = time.thread_time_ns()
        roster.put(who.address, snapshot_of(who, load, decode=reporting.decode))
        reports.append((time.thread_time_ns() - began) / 1e3)
    for name, values in (("decision", decisions), ("update of a view", updates), ("report", reports)):
        cuts = quantiles(values, n=100)
        figure = {"figure": name, "workers": num_workers, "p50_us": round(cuts[49], 1), "p99_us": round(cuts[98], 1)}
        print(json.dumps(figure))


if __name__ == "__main__":
    main()
