"""The memory of packed weights, given back while a worker sleeps.

    forget()    pages of the file   ──► the system may forget them, and reads them again by itself
                a copy              ──► given back; the file stays open: another may take its name, but not its content
    restore()   a copy              ◄── read into the same addresses, which kernels and their tables hold

What the file does not hold (tables of rotary embeddings) stays. So do the edges of tensors, which share pages with others.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from bisect import bisect
from collections.abc import Iterator, Sequence
from pathlib import Path

from torch import Tensor, uint8

from pdmesh.engine.kernels.cpu.model import PackedWeights
from pdmesh.engine.loader import packed_cache, packed_file
from pdmesh.engine.loader.packed_file import PlacedTensor, UnusableFile
from pdmesh.platform import linux

_PADDING = 64  # bytes at most between two tensors of one allocation
_PIECE = 16 * 2**20


class ReleasedWeights:
    """Weights whose memory is given back. `num_bytes` of it."""

    def __init__(self, fd: int, placed: Sequence[PlacedTensor], *, is_mapped: bool) -> None:
        self._fd: int | None = fd
        self._placed, self._is_mapped = placed, is_mapped
        self._spans = list(_spans([each.tensor for each in placed]))
        self.num_bytes = sum(end - start for start, end in self._spans)

    def forget(self) -> None:
        """Give the memory back, as far as the system takes it."""
        with contextlib.suppress(OSError):
            for start, end in self._spans:
                linux.forget_pages(start, end - start)

    def restore(self) -> None:
        """Have the weights again, the same bits; idempotent. Raises OSError or UnusableFile, and may be called again."""
        if self._fd is None:
            return
        if self._is_mapped:
            for start, end in self._spans:  # else the first step reads them, page by page
                with contextlib.suppress(OSError):
                    linux.read_pages(start, end - start)
        else:
            for each in self._placed:
                _read_at(self._fd, each)
        self.close()

    def close(self) -> None:
        """Close the file; idempotent. What was not restored is lost."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def releasable(weights: PackedWeights) -> ReleasedWeights | None:
    """Return what gives the memory of weights back, from whose `forget` on nothing may compute with them until they are restored.
    None: no file holds them, so they stay."""
    if weights.file is None:
        return None
    path, key = Path(weights.file[0]), weights.file[1]
    try:
        with path.open("rb", buffering=0) as file:
            if not packed_cache.is_whole(path, os.fstat(file.fileno())):
                return None
            placed = packed_file.placed(file, path, weights, key)
            if not weights.mapped_bytes:
                placed = _writable(placed)
            fd = os.dup(file.fileno())
    except (OSError, UnusableFile):
        return None
    return ReleasedWeights(fd, placed, is_mapped=bool(weights.mapped_bytes))


def _writable(placed: Sequence[PlacedTensor]) -> list[PlacedTensor]:
    """Return those that can be written back: memory of this process alone. A builder may have left others as pages of a
    checkpoint."""
    own = linux.own_memory()
    starts = [start for start, _ in own]

    def is_own(tensor: Tensor) -> bool:
        index = bisect(starts, tensor.data_ptr()) - 1
        return index >= 0 and tensor.data_ptr() + tensor.nbytes <= own[index][1]

    return [each for each in placed if each.tensor.is_contiguous() and is_own(each.tensor)]


def _spans(tensors: Sequence[Tensor]) -> Iterator[tuple[int, int]]:
    """Yield the addresses of whole pages that hold nothing but these tensors. Those of one allocation make one span: what lies
    between them is padding."""
    ranges = sorted((each.untyped_storage().data_ptr(), each.data_ptr(), each.nbytes) for each in tensors if each.nbytes)
    joined: list[tuple[int, int, int]] = []  # allocation, start, end
    for allocation, start, num_bytes in ranges:
        if joined and joined[-1][0] == allocation and start - joined[-1][2] < _PADDING:
            joined[-1] = (allocation, joined[-1][1], max(joined[-1][2], start + num_bytes))
        else:
            joined.append((allocation, start, start + num_bytes))
    for _, start, end in joined:
        first, last = start + -start % mmap.PAGESIZE, end - end % mmap.PAGESIZE
        if first < last:
            yield first, last


def _read_at(fd: int, placed: PlacedTensor) -> None:
    view = memoryview(placed.tensor.view(-1).view(uint8).numpy().data)
    done = 0
    while done < len(view):
        count = os.preadv(fd, [view[done : done + _PIECE]], placed.offset + done)
        if not count:
            raise UnusableFile(f"the file of the weights ended at byte {placed.offset + done} while it was read")
        done += count
