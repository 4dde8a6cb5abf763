"""The blocks of all workers together, as one prefix cache: a block is in it while at least one worker holds it. Pure."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from router.routing.worker_snapshot import WorkerKey


@dataclass(frozen=True, slots=True, eq=False)
class MeshBlock:
    """Describe a block, whichever workers hold it."""

    name: int  # the first eight bytes of its hash
    parent: int | None  # name of the block before it; None: it begins a prompt
    token_ids: array[int]
    cache_root: bytes  # of identity, tenant and salt
    adapter: str  # name of the LoRA adapter that computed it; empty: none


@dataclass(frozen=True)
class MeshChanges:
    """Tell what the mesh as a whole has lost, then gained."""

    removed: tuple[int, ...] = ()
    stored: tuple[MeshBlock, ...] = ()


class MeshBlocks:
    """Hold the blocks, and the workers that hold each. Its size is `num_pairs`, of block and worker."""

    def __init__(self) -> None:
        self._blocks: dict[int, MeshBlock] = {}
        self._num_holders: Counter[int] = Counter()
        self._held: dict[WorkerKey, set[int]] = {}

    @property
    def num_pairs(self) -> int:
        """Return the pairs of block and worker."""
        return sum(map(len, self._held.values()))

    def all(self) -> tuple[MeshBlock, ...]:
        """Return all blocks."""
        return tuple(self._blocks.values())

    def num_held(self, key: WorkerKey) -> int:
        """Return how many blocks a worker holds."""
        return len(self._held.get(key, ()))

    def change(self, key: WorkerKey, removed: Iterable[int], stored: Iterable[MeshBlock]) -> MeshChanges:
        """Apply what one worker has lost, then gained; return what that means for the mesh."""
        gone = self._drop(key, removed)
        came = self._add(key, stored)
        both = gone.keys() & {block.name for block in came}
        return MeshChanges(
            tuple(name for name in gone if name not in both), tuple(block for block in came if block.name not in both)
        )

    def replace(self, key: WorkerKey, blocks: Iterable[MeshBlock]) -> MeshChanges:
        """Take the blocks as all that a worker holds; return what that means for the mesh."""
        now = {block.name: block for block in blocks}
        held = self._held.get(key, set())
        return self.change(key, held - now.keys(), [block for name, block in now.items() if name not in held])

    def forget(self, key: WorkerKey) -> MeshChanges:
        """Forget a worker; return what that means for the mesh."""
        changes = self.replace(key, ())
        self._held.pop(key, None)
        return changes

    def _drop(self, key: WorkerKey, names: Iterable[int]) -> dict[int, MeshBlock]:
        held = self._held.get(key, set())
        gone: dict[int, MeshBlock] = {}
        for name in held.intersection(names):
            held.discard(name)
            self._num_holders[name] -= 1
            if not self._num_holders[name]:
                del self._num_holders[name]
                gone[name] = self._blocks.pop(name)
        return gone

    def _add(self, key: WorkerKey, blocks: Iterable[MeshBlock]) -> list[MeshBlock]:
        held = self._held.setdefault(key, set())
        came: list[MeshBlock] = []
        for block in blocks:
            if block.name in held:
                continue
            held.add(block.name)
            self._num_holders[block.name] += 1
            if block.name not in self._blocks:
                self._blocks[block.name] = block
                came.append(block)
        return came
