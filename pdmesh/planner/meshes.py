"""The candidates of a plan: kinds of workers, meshes of them, and how many of each. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from pdmesh.planner.traffic import Traffic
from pdmesh.planning.capacity_load import Goals, Limits, Worker
from pdmesh.planning.latency_model import NO_DRAFTS, Drafts
from pdmesh.planning.prompt_times import largest_batch
from pdmesh.planning.roofline import Roofline
from pdmesh.simulator.workers.spec import KNOWN_STEPS, WorkerSpec

AGGREGATED, SEPARATED = "aggregated", "separated"


@dataclass(frozen=True)
class WorkerKind:
    """Describe one way to run the model: `num_devices` share it. `roofline` None: its speed was measured."""

    spec: WorkerSpec
    num_devices: int = 1
    roofline: Roofline | None = None

    @property
    def name(self) -> str:
        """Return a name such as "tp2, 128 sequences, 2048 tokens a step"."""
        spread = f"tp{self.num_devices}, " if self.num_devices > 1 else ""
        return f"{spread}{self.spec.max_num_seqs} sequences, {self.spec.max_num_batched_tokens} tokens a step"

    @property
    def kv_tokens(self) -> int:
        """Return the KV tokens that fit."""
        return self.spec.num_blocks * self.spec.block_size

    def drafting(self, drafts: Drafts) -> WorkerKind:
        """Return the same with this speculation where it pays; as it is, without any."""
        tokens, computed = drafts.tokens_per_row, drafts.computed_per_row
        return (
            self
            if drafts == NO_DRAFTS
            else replace(self, spec=replace(self.spec, tokens_per_row=tokens, computed_per_row=computed))
        )

    @cached_property
    def worker(self) -> Worker:
        """Return the worker for capacity planning."""
        spec = self.spec
        limits = Limits(spec.max_num_batched_tokens, spec.max_num_seqs, self.kv_tokens)
        return Worker(spec.speed, limits, spec.keeps_pace, spec.drafts)


def by_roofline(
    roofline: Roofline, max_num_seqs: int, max_num_batched_tokens: int, kv_share: float, max_context: int
) -> WorkerKind:
    """Return a worker with these limits. Raises ValueError where the model leaves no memory for KV."""
    block_size, kv_tokens = 16, roofline.kv_tokens(kv_share)
    if kv_tokens < block_size:
        raise ValueError(f"weights of {roofline.held_bytes() / 1e9:.0f} GB leave no room for KV")
    spec = WorkerSpec(
        replace(roofline.latency(max_num_batched_tokens, max_num_seqs), num_steps=KNOWN_STEPS),
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_seqs=max_num_seqs,
        num_blocks=kv_tokens // block_size,
        block_size=block_size,
        max_context=max_context,
        kv_bytes_per_token=roofline.decoder.kv_bytes_per_token(roofline.kv_dtype),
    )
    return WorkerKind(spec, roofline.tensor_parallel, roofline)


@dataclass(frozen=True)
class Size:
    """Hold the workers of each pool."""

    num_prefill: int
    num_decode: int

    def at_most(self, other: Size) -> bool:
        """Return whether it has no more of either."""
        return self.num_prefill <= other.num_prefill and self.num_decode <= other.num_decode


@dataclass(frozen=True)
class Shape:
    """Hold kinds without numbers. `prefill` None: decode workers compute their prompts themselves."""

    decode: WorkerKind
    prefill: WorkerKind | None = None

    @property
    def mesh(self) -> str:
        """Return AGGREGATED or SEPARATED."""
        return AGGREGATED if self.prefill is None else SEPARATED

    @property
    def least_cost(self) -> int:
        """Return the devices of the smallest mesh."""
        return self.decode.num_devices + (self.prefill.num_devices if self.prefill else 0)

    def cost(self, size: Size) -> int:
        """Return the devices of a size."""
        return size.num_decode * self.decode.num_devices + (size.num_prefill * self.prefill.num_devices if self.prefill else 0)

    def sizes(self, max_cost: int) -> list[Size]:
        """Return the sizes within the cost to which no worker can be added."""
        if self.prefill is None:
            num = max_cost // self.decode.num_devices
            return [Size(0, num)] if num else []
        most = (max_cost - self.decode.num_devices) // self.prefill.num_devices
        sizes = [Size(num, (max_cost - num * self.prefill.num_devices) // self.decode.num_devices) for num in range(1, most + 1)]
        return [size for size in sizes if not any(size != other and size.at_most(other) for other in sizes)]


@dataclass(frozen=True)
class Point:
    """Hold a mesh with numbers, to be simulated."""

    shape: Shape
    size: Size

    @property
    def cost(self) -> int:
        """Return its devices."""
        return self.shape.cost(self.size)

    @property
    def name(self) -> str:
        """Return a name such as "3 prefill + 2 decode"."""
        return (
            f"{self.size.num_prefill} prefill + {self.size.num_decode} decode"
            if self.shape.prefill
            else str(self.size.num_decode)
        )

    @property
    def num_seats(self) -> int:
        """Return the sequences that all its decode workers can hold."""
        return self.size.num_decode * self.shape.decode.spec.max_num_seqs


# The kinds of workers that a plan chooses from: useful degrees of tensor parallelism and limits of batches.


DEGREES = (1, 2, 4, 8)
STEP_TOKENS = (512, 2048, 8192)
FEWEST_SEQS, MOST_SEQS = 8, 512


@dataclass(frozen=True)
class Limitation:
    """Hold the user's restrictions; empty: the useful ones. `drafts`: the speculation to reckon with."""

    tensor_parallel: tuple[int, ...] = ()
    max_num_seqs: tuple[int, ...] = ()
    max_num_batched_tokens: tuple[int, ...] = ()
    drafts: Drafts = NO_DRAFTS


def roofline_kinds(
    roofline: Roofline, limitation: Limitation, kv_share: float, max_context: int, traffic: Traffic, goals: Goals
) -> tuple[list[WorkerKind], list[str]]:
    """Return the kinds that can hold the longest request; and why others cannot. Raises ValueError for an impossible degree."""
    kinds: list[WorkerKind] = []
    notes: list[str] = []
    for degree in limitation.tensor_parallel or _degrees(roofline):
        each = replace(roofline, tensor_parallel=degree, context=max(1.0, traffic.load.lengths.running_context))
        kv_tokens = each.kv_tokens(kv_share)
        if kv_tokens < traffic.longest:
            notes.append(_no_room(each, kv_tokens, traffic))
            continue
        for seqs, tokens in _limits(limitation, _batch(each, kv_share, traffic, goals, limitation.drafts), max_context):
            kinds.append(by_roofline(each, seqs, tokens, kv_share, max_context).drafting(limitation.drafts))
    return kinds, notes


def measured_kinds(spec: WorkerSpec, limitation: Limitation) -> list[WorkerKind]:
    """Return a measured worker with its own limits, or with the requested ones. Raises ValueError."""
    if set(limitation.tensor_parallel) - {1}:
        raise ValueError("tensor_parallel: a measured speed is that of one worker as it is; give 1, or no --speed")
    seqs = limitation.max_num_seqs or (spec.max_num_seqs,)
    tokens = limitation.max_num_batched_tokens or (spec.max_num_batched_tokens,)
    pairs = [(num, most) for num in seqs for most in tokens if num < most]
    if not pairs:
        raise ValueError("max_num_seqs: must be below --max-num-batched-tokens")
    kinds = [WorkerKind(replace(spec, max_num_seqs=num, max_num_batched_tokens=most)) for num, most in pairs]
    return [kind.drafting(limitation.drafts) for kind in kinds]


def _degrees(roofline: Roofline) -> list[int]:
    """Return the degrees that divide the KV heads; one, without a link."""
    most = DEGREES if roofline.device.link_bytes_per_s else DEGREES[:1]
    return [degree for degree in most if roofline.decoder.num_kv_heads % degree == 0]


def _batch(roofline: Roofline, kv_share: float, traffic: Traffic, goals: Goals, drafts: Drafts) -> int:
    """Return the sequences that each get their tokens in time, with a little headroom."""
    model = roofline.latency(STEP_TOKENS[-1], MOST_SEQS)
    worker = Worker(model, Limits(STEP_TOKENS[-1], MOST_SEQS, roofline.kv_tokens(kv_share)), drafts=drafts)
    return largest_batch(worker, traffic.load.lengths, goals)


def _limits(limitation: Limitation, batch: int, max_context: int) -> list[tuple[int, int]]:
    """Return sequences and tokens of a step: powers of two around the largest useful batch."""
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
