"""The interpreter of triton 3.6 spends nearly all of its time on types: each value builds anew what its shape and its dtype say.
Here these are kept, so that a kernel takes a third of the time. What is computed, and what is refused, stays as it was."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np


def lower() -> None:
    """Imports triton: `TRITON_INTERPRET=1` must be set before."""
    _keep_numpy_types()
    _make_handles_quickly()
    _call_builtins_directly()
    _keep_what_operands_become()
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


def _make_handles_quickly() -> None:
    """With the same check, without a dataclass's ways."""
    from triton.language import core
    from triton.runtime import interpreter

    widths = dict[str, int]()

    def fits(array: Any, dtype: Any) -> bool:
        if isinstance(dtype, core.pointer_type):
            return True
        if dtype.name not in widths:
            widths[dtype.name] = max(8, dtype.primitive_bitwidth)
        return int(array.itemsize) * 8 <= widths[dtype.name]

    def made(self: Any, data: Any, dtype: Any, attr: Any = None) -> None:
        self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr
        if not fits(data, dtype):
            raise ValueError(f"numpy data itemsize ({data.itemsize * 8} bits) exceeds that of triton type {dtype}")

    interpreter._validate_np_data_size, interpreter.TensorHandle.__init__ = fits, made


def _call_builtins_directly() -> None:
    """What refuses to run without `_semantic` is given it, so it need not be asked."""
    from triton.language import core
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter

    asking = core.builtin(lambda: None).__code__

    def patch(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        called = member.__wrapped__ if getattr(member, "__code__", None) is asking else member
        semantic = TritonSemantic(builder)

        def given(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = semantic
            return called(*args, **kwargs)

        scope.set_attr(obj, name, given)

    interpreter._patch_attr = patch


def _keep_what_operands_become() -> None:
    """Which conversions two operands need follows from their types, and what a number becomes beside a tensor from the number
    and the tensor's type: none is decided twice. Numbers beside unsigned integers are left alone: a shift writes to them."""
    from triton.language import core, semantic

    before = semantic.TritonSemantic.binary_op_type_checking_impl
    alike, numbers = dict[tuple[Any, ...], bool](), dict[tuple[Any, ...], Any]()

    def check(self: Any, lhs: Any, rhs: Any, *flags: Any, **more: Any) -> Any:
        kinds = type(lhs), type(rhs)
        if kinds == (core.tensor, core.tensor):
            key = (lhs.dtype.name, rhs.dtype.name, *flags, *more.items())
            if alike.get(key):
                return self.broadcast_impl_value(lhs, rhs)
            if lhs.shape is rhs.shape and key not in alike:
                found = before(self, lhs, rhs, *flags, **more)
                alike[key] = found[0] is lhs and found[1] is rhs
                return found
        elif kinds[0] is core.tensor and kinds[1] in (int, float) and rhs == rhs and not lhs.dtype.is_int_unsigned():
            key = (lhs.dtype.name, id(lhs.shape), kinds[1], rhs, *flags, *more.items())
            if key in numbers:
                return lhs, numbers[key]
            found = before(self, lhs, rhs, *flags, **more)
            if found[0] is lhs:
                numbers[key] = found[1]
            return found
        return before(self, lhs, rhs, *flags, **more)

    semantic.TritonSemantic.binary_op_type_checking_impl = check


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
