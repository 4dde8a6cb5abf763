"""What Triton's interpreter needs here before a kernel runs in it."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.engine.kernels.triton import interpreter_costs


def mend() -> None:
    """Imports triton: `TRITON_INTERPRET=1` must be set before."""
    _scalars_as_indices()
    _products_of_bfloat16()
    _rounding_to_bfloat16()
    _patch_once()
    interpreter_costs.lower()
    _stand_in_for_graphs()


def _stand_in_for_graphs() -> None:
    from tests.engine.kernels.triton.frozen import stand_in

    stand_in()


def _scalars_as_indices() -> None:
    """The interpreter of triton 3.6 keeps scalars as arrays of one element, which numpy from 2.4 on takes for no int."""
    from triton.runtime import interpreter

    before = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        before(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patched


def _products_of_bfloat16() -> None:
    """The interpreter of triton 3.6 keeps bfloat16 as uint16, and multiplies matrices of it as such. Widened they are the same
    numbers, and products of two are exact, as in the matrix units.

    Sums are made in float64 and rounded once: in float32 numpy's order, and so the bits of a row, depend on the number of rows on
    some processors (Zen 3), which the matrix units' do not.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    before = interpreter.InterpreterBuilder.create_dot

    def widened(factor: Any) -> Any:
        if factor.dtype.scalar != tl.bfloat16:
            return factor
        return interpreter.TensorHandle((factor.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def product(self: Any, left: Any, right: Any, *others: Any) -> Any:
        if left.dtype.scalar in (tl.float32, tl.float16, tl.bfloat16) and others[0].data.dtype == np.float32:
            sums = np.matmul(widened(left).data.astype(np.float64), widened(right).data.astype(np.float64))
            return interpreter.TensorHandle(sums.astype(np.float32) + others[0].data, others[0].dtype.scalar)
        return before(self, widened(left), widened(right), *others)

    interpreter.InterpreterBuilder.create_dot = product


def _rounding_to_bfloat16() -> None:
    """The interpreter drops the bits that bfloat16 lacks; a GPU, and torch, round to nearest even."""
    import triton.language as tl
    from triton.runtime import interpreter

    before = interpreter.InterpreterBuilder.cast_impl

    def cast(self: Any, source: Any, target: Any) -> Any:
        if source.dtype.scalar != tl.float32 or target.scalar != tl.bfloat16:
            return before(self, source, target)
        bits = np.ascontiguousarray(source.data).view(np.uint32)
        rounded = np.where(np.isnan(source.data), bits | 0x400000, bits + 0x7FFF + ((bits >> 16) & 1))
        return interpreter.TensorHandle((rounded >> 16).astype(np.uint16), tl.bfloat16)

    interpreter.InterpreterBuilder.cast_impl = cast


def _patch_once() -> None:
    """The interpreter replaces the language's functions for a launch, and again at every call of one kernel function by another,
    which takes most of its time. Here they are replaced once and stay so: in this process all kernels are interpreted."""
    import triton.language as tl
    from triton.runtime import interpreter

    before, done = interpreter._patch_lang, set[frozenset[int]]()

    def patched(fn: Any) -> Any:
        langs = frozenset(id(value) for value in fn.__globals__.values() if value is tl or value is tl.core)
        if langs not in done:
            before(fn)
            done.add(langs)
        return interpreter._LangPatchScope()

    interpreter._patch_lang = patched
