"""What the machine can do, as measured: everything else is a share of these two."""

from __future__ import annotations

import torch

from benchmarks.gpu.context import Context, device_s
from benchmarks.gpu.shapes import product_operations
from benchmarks.harness import Figure

COPY, PRODUCT = "copy bandwidth", "product peak"
"""Names of the figures that the other parts are given."""


@torch.inference_mode()
def run(context: Context) -> None:
    _copy(context)
    _product(context)


def _copy(context: Context) -> None:
    """By a kernel: in a graph the driver's own copy takes another way, which reached two thirds of this on an H200."""
    source = torch.randint(0, 1 << 30, (context.scale.copy_bytes // 4,), dtype=torch.int32, device=context.device)
    target = torch.empty_like(source)
    seconds = device_s(lambda: torch.add(source, 1, out=target), context.device)
    context.note(f"copy bandwidth: {2 * source.nbytes / 1e9:.3g} GB read and written")
    context.add(Figure(COPY, 2 * source.nbytes / seconds / 1e9, "GB/s", "higher"))


def _product(context: Context) -> None:
    """Random operands: zeros draw less power, and run faster than any model's."""
    size = context.scale.product_size
    left, right = (torch.randn((size, size), device=context.device, dtype=context.dtype) for _ in range(2))
    out = torch.empty_like(left)
    seconds = device_s(lambda: torch.mm(left, right, out=out), context.device)
    operations = product_operations(size, size, size)
    context.note(f"product peak: {size} x {size} x {size} in {context.scale.dtype}, {operations / 1e12:.3g} * 10^12 operations")
    context.add(Figure(PRODUCT, operations / seconds / 1e12, "10^12 operations/s", "higher"))
