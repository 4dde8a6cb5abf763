"""The quantized weights of one checkpoint, between the names that a family knows and the tensors that a format stores."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from pdmesh.engine.loader.quantize import GROUPS, Int4Weight, Int8Weight
from pdmesh.engine.loader.quantized.format import Stored, WeightFormat
from pdmesh.engine.loader.quantized.grid import Codes
from pdmesh.engine.models.names import Take

_T = TypeVar("_T", Int4Weight, Int8Weight)


class QuantizedWeights:
    """Give weights dequantized, or as they are where a kernel has the checkpoint's grid, and count both.

    A family's changes to a tensor, such as rows taken out of a fused one, are done to dequantized weights. Where a change does
    nothing but choose and order rows, it is done to codes and scales as well."""

    def __init__(self, form: WeightFormat, stored: Stored) -> None:
        self.format, self._stored = form, stored
        self._last: tuple[str, int, Codes | Tensor] | None = None  # a fused weight is asked for part by part
        self._taken: dict[tuple[str, int], bool] = {}  # by name and expert, whether it was taken as it is

    def holds(self, name: str) -> bool:
        """Return whether the tensor that a family names so is quantized."""
        return bool(name) and self.format.holds(_stem(name), self._stored)

    def unread(self, take: Take) -> Tensor:
        """Return what `get` does on device meta, which has no numbers: by headers alone."""
        tensor = torch.empty(self.format.shape(_stem(take.name), self._stored), device="meta")
        for change in take.linear_change:
            tensor = change(tensor)
        return tensor

    def get(self, take: Take) -> Tensor:
        """Return the dequantized weight, with the family's changes."""
        weight = self._read(take)
        tensor = weight if isinstance(weight, Tensor) else weight.dequantize()
        for change in take.linear_change:
            tensor = change(tensor)
        self._count(take, is_exact=False)
        return tensor

    def int4(self, take: Take, group: int) -> Int4Weight | None:
        """Return the weight in the file's own codes, or None."""
        return self._as_it_is(take, lambda codes: codes.int4(group))

    def int8(self, take: Take) -> Int8Weight | None:
        """Return the weight in the file's own codes, or None."""
        return self._as_it_is(take, lambda codes: codes.int8())

    def _as_it_is(self, take: Take, give: Callable[[Codes], _T | None]) -> _T | None:
        codes = self._read(take)
        if isinstance(codes, Tensor):
            return None
        if take.linear_change:
            picked = _picked_rows(take, codes.num_rows)
            exact = None if picked is None else give(codes.rows(picked))
        else:
            exact = give(codes)
        if exact is not None:
            self._count(take, is_exact=True)
        return exact

    def _count(self, take: Take, *, is_exact: bool) -> None:
        """What a weight was last taken as counts: backends ask for codes first, and one weight is tried to choose a format."""
        self._taken[take.name, take.expert] = is_exact

    def _read(self, take: Take) -> Codes | Tensor:
        if self._last is None or self._last[:2] != (take.name, take.expert):
            self._last = None
            self._last = (take.name, take.expert, self.format.read(_stem(take.name), self._stored, take.expert))
        return self._last[2]

    def forget(self) -> None:
        """Free what was kept for the next part of a fused weight."""
        self._last = None

    def is_empty_bias(self, name: str) -> bool:
        """Return whether this is a bias of zeros: some tools write one for every quantized map, whatever the model has."""
        stem = name.removesuffix(".bias")
        return stem != name and self.format.holds(stem, self._stored) and not bool(self._stored.tensor(name).any())

    def reading(self, worker: str, group: int) -> str:
        """Return what was read and what became of it in the worker's format; empty where no weight is quantized."""
        exact = sum(self._taken.values())
        converted = len(self._taken) - exact
        if not self._taken:
            return ""
        is_plain = worker in ("float32", "float16", "bfloat16")
        rounded = "" if is_plain else ", rounded a second time"
        parts = [f"{exact} taken as they are, as {worker}"] if exact else []
        parts += [f"{converted} dequantized to {worker}{rounded}"] if converted else []
        text = f"weights are {self.format.title}: {' and '.join(parts)}"
        return text + self._hint(exact, worker, group) + (f"; {self.format.note}" if self.format.note else "")

    def _hint(self, exact: int, worker: str, group: int) -> str:
        own = next((size for size in sorted(GROUPS, reverse=True) if self.format.group and self.format.group % size == 0), 0)
        return f" (give quantization_group={own} for fewer bytes)" if exact and worker == "int4" and own > group else ""


def _stem(name: str) -> str:
    return name.removesuffix(".weight")


def _picked_rows(take: Take, count: int) -> Tensor | None:
    """Return the stored row of each row that the family's changes give; None where they do more than that. They are tried on
    two columns of row numbers."""
    numbers = torch.arange(count)
    rows = torch.stack((numbers, numbers + count), dim=1)
    try:
        for change in take.linear_change:
            rows = change(rows)
    except (RuntimeError, IndexError):
        return None
    is_table = rows.dtype == torch.int64 and rows.dim() == 2 and rows.shape[1] == 2
    return rows[:, 0] if is_table and bool((rows[:, 1] - rows[:, 0] == count).all()) else None
