"""The quantized weights of one checkpoint, between the names that a family knows and the tensors that a format stores."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from pdmesh.engine.loader.quantize import Int4Weight, Int8Weight
from pdmesh.engine.loader.quantized.format import Stored, WeightFormat
from pdmesh.engine.loader.quantized.grid import Codes
from pdmesh.engine.models.names import Take

logger = logging.getLogger(__name__)

_T = TypeVar("_T", Int4Weight, Int8Weight)


class QuantizedWeights:
    """Give weights dequantized, or as they are where a kernel has the checkpoint's grid, and count both.

    A family's changes to a tensor, such as rows taken out of a fused one, are done to dequantized weights. Where a change does
    nothing but choose and order rows, it is done to codes and scales as well."""

    def __init__(self, form: WeightFormat, stored: Stored) -> None:
        self.format, self._stored = form, stored
        self._last: tuple[str, int, Codes | Tensor] | None = None  # a fused weight is asked for part by part
        self._exact: set[tuple[str, int]] = set()
        self._dequantized: set[tuple[str, int]] = set()

    def holds(self, name: str) -> bool:
        """Return whether the tensor that a family names so is quantized."""
        return bool(name) and self.format.holds(_stem(name), self._stored)

    def get(self, take: Take) -> Tensor:
        """Return the dequantized weight, with the family's changes."""
        weight = self._read(take)
        tensor = weight if isinstance(weight, Tensor) else weight.dequantize()
        for change in take.linear_change:
            tensor = change(tensor)
        self._dequantized.add((take.name, take.expert))
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
            self._exact.add((take.name, take.expert))
        return exact

    def _read(self, take: Take) -> Codes | Tensor:
        if self._last is None or self._last[:2] != (take.name, take.expert):
            self._last = None
            self._last = (take.name, take.expert, self.format.read(_stem(take.name), self._stored, take.expert))
        return self._last[2]

    def forget(self) -> None:
        """Free what was kept for the next part of a fused weight."""
        self._last = None

    def say(self, form: str, num_bytes: int, stored_bytes: int) -> None:
        """Log, once a model is loaded, what was read and what it costs in the worker's format `form`."""
        converted = len(self._dequantized - self._exact)
        total = converted + len(self._exact)
        if not total:
            return
        logger.info("%s", reading(self.format, len(self._exact), converted, form, num_bytes, stored_bytes))


def reading(form: WeightFormat, exact: int, converted: int, worker: str, num_bytes: int, stored_bytes: int) -> str:
    """Return the line that says what a worker made of a quantized checkpoint."""
    is_plain = worker in ("float32", "float16", "bfloat16")
    taken = f"{exact} weights taken as they are" if exact else ""
    other = f"{converted} weights dequantized to {worker}" + ("" if is_plain else ", rounded a second time") if converted else ""
    what = "; ".join(part for part in (taken, other) if part)
    size = f"{num_bytes / 1e9:.2f} GB here, {stored_bytes / 1e9:.2f} GB in the files"
    return f"weights are {form.title}: {what}; {size}" + (f"; {form.note}" if form.note else "")


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
