"""What the capture of a CUDA graph refuses, told by the calls alone, since host and device are one memory here: questions to the
device, and memory of the host among what is recorded. A literal "cpu" given as a device is not seen."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class CaptureRefused(RuntimeError):
    """Names the call."""


_ASKING = frozenset(
    {
        "_local_scalar_dense",
        "_unique2",
        "equal",
        "is_nonzero",
        "item",
        "masked_select",
        "nonzero",
        "unique_consecutive",
        "unique_dim",
    }
)
_TO_HOST = frozenset({"cpu", "numpy", "pin_memory", "tolist"})
_FROM_HOST = frozenset({"as_tensor", "from_numpy", "frombuffer", "new_tensor", "tensor"})
_FACTORIES = frozenset(
    {"arange", "empty", "empty_strided", "eye", "full", "linspace", "ones", "rand", "randint", "randn", "randperm", "zeros"}
)


class NoHost(TorchFunctionMode):
    """Calls of torch as they are written: a tensor that names no device would lie on the host."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name, given = getattr(func, "__name__", ""), kwargs or {}
        if name in _TO_HOST | _FROM_HOST:
            raise CaptureRefused(f"{name}: copies between the device and pageable memory of the host")
        if name in _FACTORIES and given.get("device") is None:
            raise CaptureRefused(f"{name}: names no device, so it is memory of the host")
        return func(*args, **given)


def check_operation(name: str, args: tuple[Any, ...]) -> None:
    """`name` of an ATen operation, without its overload. Raises CaptureRefused."""
    if name in _ASKING:
        raise CaptureRefused(f"{'item' if name == '_local_scalar_dense' else name}: waits for the device")
    if name == "lift_fresh":
        raise CaptureRefused("numbers of Python: a copy from pageable memory of the host")
    if name == "index" and any(index is not None and index.dtype is torch.bool for index in args[1]):
        raise CaptureRefused("index by a mask: how much it takes is known to the device alone")
