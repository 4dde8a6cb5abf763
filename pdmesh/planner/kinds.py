"""The kinds of workers that a plan chooses from: degrees of tensor parallelism and limits of batches that make sense. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pdmesh.planner.meshes import WorkerKind, by_roofline
from pdmesh.planner.traffic import Traffic
from pdmesh.planning.capacity_load import Goals, Limits, Worker
from pdmesh.planning.capacity_steps import largest_batch
from pdmesh.planning.roofline import Roofline
from pdmesh.simulator.workers.spec import WorkerSpec

DEGREES = (1, 2, 4, 8)
STEP_TOKENS = (512, 2048, 8192)
FEWEST_SEQS, MOST_SEQS = 8, 512


@dataclass(frozen=True)
class Limitation:
    """What the user asked for; empty: what makes sense."""

    tensor_parallel: tuple[int, ...] = ()
    max_num_seqs: tuple[int, ...] = ()
    max_num_batched_tokens: tuple[int, ...] = ()


def roofline_kinds(
    roofline: Roofline, limitation: Limitation, kv_share: float, max_context: int, traffic: Traffic, goals: Goals
) -> tuple[list[WorkerKind], list[str]]:
    """Those that have room for the longest request; and why others have not. Raises ValueError for a degree that cannot be."""
    kinds: list[WorkerKind] = []
    notes: list[str] = []
    for degree in limitation.tensor_parallel or _degrees(roofline):
        each = replace(roofline, tensor_parallel=degree)
        kv_tokens = each.kv_tokens(kv_share)
        if kv_tokens < traffic.longest:
            notes.append(_no_room(each, kv_tokens, traffic))
            continue
        for seqs, tokens in _limits(limitation, _batch(each, kv_share, traffic, goals), max_context):
            kinds.append(by_roofline(each, seqs, tokens, kv_share, max_context))
    return kinds, notes


def measured_kinds(spec: WorkerSpec, limitation: Limitation) -> list[WorkerKind]:
    """A measured worker with its own limits, or with those that were asked for. Raises ValueError."""
    if set(limitation.tensor_parallel) - {1}:
        raise ValueError("tensor_parallel: a measured speed is that of one worker as it is; give 1, or no --speed")
    seqs = limitation.max_num_seqs or (spec.max_num_seqs,)
    tokens = limitation.max_num_batched_tokens or (spec.max_num_batched_tokens,)
    pairs = [(num, most) for num in seqs for most in tokens if num < most]
    if not pairs:
        raise ValueError("max_num_seqs: must be below --max-num-batched-tokens")
    return [WorkerKind(replace(spec, max_num_seqs=num, max_num_batched_tokens=most)) for num, most in pairs]


def _degrees(roofline: Roofline) -> list[int]:
    """Those that divide the KV heads; one, without a link."""
    most = DEGREES if roofline.device.link_bytes_per_s else DEGREES[:1]
    return [degree for degree in most if roofline.decoder.num_kv_heads % degree == 0]


def _batch(roofline: Roofline, kv_share: float, traffic: Traffic, goals: Goals) -> int:
    """Sequences of which each gets its tokens in time, with a little room."""
    model = roofline.latency(STEP_TOKENS[-1], MOST_SEQS)
    worker = Worker(model, Limits(STEP_TOKENS[-1], MOST_SEQS, roofline.kv_tokens(kv_share)))
    return largest_batch(worker, traffic.load.lengths, goals)


def _limits(limitation: Limitation, batch: int, max_context: int) -> list[tuple[int, int]]:
    """Sequences and tokens of a step: powers of two around the largest batch that is of use."""
    enough = min(MOST_SEQS, max(2 * FEWEST_SEQS, 1 << (batch - 1).bit_length()))
    seqs: Sequence[int] = limitation.max_num_seqs or (enough, enough // 2)
    useful = [tokens for tokens in STEP_TOKENS if tokens < 2 * max_context]
    tokens: Sequence[int] = limitation.max_num_batched_tokens or useful or STEP_TOKENS[:1]
    pairs = [(num, most) for num in seqs for most in tokens if num < most]
    if not pairs:
        raise ValueError("max_num_seqs: must be below --max-num-batched-tokens")
    return pairs


def _no_room(roofline: Roofline, kv_tokens: int, traffic: Traffic) -> str:
    held, num = roofline.held_bytes() / 1e9, roofline.tensor_parallel
    devices = roofline.device.name if num == 1 else f"{num} {roofline.device.name}"
    if not kv_tokens:
        return f"{devices}: weights of {held:.0f} GB leave no room for KV"
    return f"{devices}: KV for {kv_tokens} tokens beside weights of {held:.0f} GB; the longest request has {traffic.longest}"
