"""CUDA's driver, for what torch has no call for: its library is loaded wherever torch has a device, and its names are stable."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class CudaError(RuntimeError):
    """A call of the driver failed."""


class Driver:
    """libcuda, with a device's primary context, which is torch's. Raises OSError, CudaError."""

    def __init__(self, ordinal: int) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")
        self.call("cuInit", 0)
        self.device = self.device_of(ordinal)
        self._context = ctypes.c_void_p()
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), self.device)  # until the process ends

    def call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._library, name)(*arguments)
        if code:
            said = ctypes.c_char_p()
            self._library.cuGetErrorName(code, ctypes.byref(said))
            raise CudaError(f"{name}: {(said.value or b'error').decode()} ({code})")

    @contextmanager
    def current(self) -> Iterator[None]:
        """This thread may not have used the device before."""
        self.call("cuCtxPushCurrent_v2", self._context)
        try:
            yield
        finally:
            self.call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def device_of(self, ordinal: int) -> ctypes.c_int:
        device = ctypes.c_int()
        self.call("cuDeviceGet", ctypes.byref(device), ordinal)
        return device

    def num_devices(self) -> int:
        count = ctypes.c_int()
        self.call("cuDeviceGetCount", ctypes.byref(count))
        return count.value

    def uuid(self, device: ctypes.c_int) -> bytes:
        raw = ctypes.create_string_buffer(16)
        self.call("cuDeviceGetUuid_v2", raw, device)
        return raw.raw

    def attribute(self, name: int, address: int) -> int:
        value = ctypes.c_int()
        self.call("cuPointerGetAttribute", ctypes.byref(value), name, ctypes.c_uint64(address))
        return value.value

    def extent(self, address: int) -> tuple[int, int]:
        """Beginning and bytes of the allocation around it."""
        begin, size = ctypes.c_uint64(), ctypes.c_size_t()
        self.call("cuMemGetAddressRange_v2", ctypes.byref(begin), ctypes.byref(size), ctypes.c_uint64(address))
        return begin.value, size.value
