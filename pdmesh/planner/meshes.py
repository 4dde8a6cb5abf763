"""What a plan may consist of: kinds of workers, meshes of them, and how many of each. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from pdmesh.planning.capacity_load import Limits, Worker
from pdmesh.planning.roofline import Roofline
from pdmesh.simulator.workers.spec import KNOWN_STEPS, WorkerSpec

AGGREGATED, SEPARATED = "aggregated", "separated"


@dataclass(frozen=True)
class WorkerKind:
    """One way to run the model: `num_devices` share it. `roofline` None: its speed was measured."""

    spec: WorkerSpec
    num_devices: int = 1
    roofline: Roofline | None = None

    @property
    def name(self) -> str:
        """Such as "tp2, 128 sequences, 2048 tokens a step"."""
        spread = f"tp{self.num_devices}, " if self.num_devices > 1 else ""
        return f"{spread}{self.spec.max_num_seqs} sequences, {self.spec.max_num_batched_tokens} tokens a step"

    @property
    def kv_tokens(self) -> int:
        """That have room."""
        return self.spec.num_blocks * self.spec.block_size

    @cached_property
    def worker(self) -> Worker:
        """As capacity arithmetic knows it."""
        spec = self.spec
        return Worker(spec.speed, Limits(spec.max_num_batched_tokens, spec.max_num_seqs, self.kv_tokens))


def by_roofline(
    roofline: Roofline, max_num_seqs: int, max_num_batched_tokens: int, kv_share: float, max_context: int
) -> WorkerKind:
    """One with these limits. Raises ValueError where the model leaves no room for KV."""
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
    """Workers of each pool."""

    num_prefill: int
    num_decode: int

    def at_most(self, other: Size) -> bool:
        """Has it no more of either?"""
        return self.num_prefill <= other.num_prefill and self.num_decode <= other.num_decode


@dataclass(frozen=True)
class Shape:
    """Kinds without numbers. `prefill` None: workers that decode compute their prompts themselves."""

    decode: WorkerKind
    prefill: WorkerKind | None = None

    @property
    def mesh(self) -> str:
        """AGGREGATED or SEPARATED."""
        return AGGREGATED if self.prefill is None else SEPARATED

    @property
    def least_cost(self) -> int:
        """Devices, without which there is no mesh."""
        return self.decode.num_devices + (self.prefill.num_devices if self.prefill else 0)

    def cost(self, size: Size) -> int:
        """Devices."""
        return size.num_decode * self.decode.num_devices + (size.num_prefill * self.prefill.num_devices if self.prefill else 0)

    def sizes(self, max_cost: int) -> list[Size]:
        """Those for so many devices to which no worker can be added."""
        if self.prefill is None:
            num = max_cost // self.decode.num_devices
            return [Size(0, num)] if num else []
        most = (max_cost - self.decode.num_devices) // self.prefill.num_devices
        sizes = [Size(num, (max_cost - num * self.prefill.num_devices) // self.decode.num_devices) for num in range(1, most + 1)]
        return [size for size in sizes if not any(size != other and size.at_most(other) for other in sizes)]


@dataclass(frozen=True)
class Point:
    """A mesh with numbers: what is simulated."""

    shape: Shape
    size: Size

    @property
    def cost(self) -> int:
        """Devices."""
        return self.shape.cost(self.size)

    @property
    def name(self) -> str:
        """Such as "3 prefill + 2 decode"."""
        return (
            f"{self.size.num_prefill} prefill + {self.size.num_decode} decode"
            if self.shape.prefill
            else str(self.size.num_decode)
        )

    @property
    def num_seats(self) -> int:
        """Sequences that all its decode workers can hold."""
        return self.size.num_decode * self.shape.decode.spec.max_num_seqs
