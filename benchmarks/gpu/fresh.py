"""Which kernels a process had to compile because nobody had done it ahead (parts/compile.py)."""

from __future__ import annotations

from collections import Counter
from typing import Any


class FreshKernels:
    """Counts what Triton's compiler makes in this process from now on; those that it finds on the disk are not among them."""

    def __init__(self) -> None:
        from triton import knobs

        self._names = Counter[str]()
        self._seconds = 0.0
        knobs.compilation.listener = self._heard

    def _heard(self, *, src: Any, times: Any, cache_hit: bool, **_: Any) -> None:
        if not cache_hit:
            self._names[str(src.name)] += 1
            self._seconds += times.total / 1e6

    def words(self) -> str:
        """Empty: none."""
        if not self._names:
            return ""
        listed = ", ".join(f"{count} {name}" for name, count in self._names.most_common())
        return f"compiled only now, {self._seconds:.1f} s: {listed}"
