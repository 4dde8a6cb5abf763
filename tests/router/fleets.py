"""Workers for the policy's tests: views with the speed of a small model on one core."""

from dataclasses import replace

from kvtransfer.layout import Layout, Transports
from kvtransfer.transports.registry import transports_with
from pdmesh.planning.latency_model import LatencyModel
from router.routing.worker_snapshot import WorkerSnapshot

SPEED = LatencyModel(
    fixed_s=4e-3,
    per_prefill_token_s=1e-3,
    per_prefill_context_s=1e-7,
    per_sequence_s=1e-3,
    per_context_token_s=1e-6,
    num_steps=99,
)


def offers(*names: str) -> Transports:
    """These transports, as a worker registers them."""
    known = transports_with(None)
    return Transports.of({name: known[name].reach for name in names})


BASE = WorkerSnapshot(
    worker_id="",
    address="",
    epoch=1,
    model="m",
    prefill=False,
    decode=False,
    identity=("m", "hash"),
    layout=Layout(16, "float32"),
    transports=offers("tcp", "shm"),
    host_id="here",
    block_size=16,
    max_context=8192,
    max_num_seqs=64,
    num_total_blocks=1000,
    num_free_blocks=1000,
    num_seqs=0,
    num_waiting_tokens=0,
    max_num_batched_tokens=256,
    latency=SPEED,
)


def worker(name: str, **fields: object) -> WorkerSnapshot:
    """The roles stand in the name: p, d, or pd for both."""
    return replace(BASE, worker_id=name, address=name, prefill="p" in name, decode="d" in name, **fields)  # type: ignore[arg-type]


def running(name: str, num_seqs: int, context: int = 300, **fields: object) -> WorkerSnapshot:
    """One that decodes `num_seqs` sequences of `context` tokens."""
    blocks = 1000 - num_seqs * -(-context // 16)
    numbers: dict[str, object] = {"num_seqs": num_seqs, "num_decoding": num_seqs, "decode_context": num_seqs * context}
    return worker(name, **{**numbers, "num_free_blocks": blocks, **fields})
