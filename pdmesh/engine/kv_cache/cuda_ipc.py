"""Sharing of a pool on a device between processes of a host, and its implementation by CUDA's memory handles (cuIpcGetMemHandle).

The driver is used and not torch's sharing of storages: that counts references in a file of shared memory, through which a
consumer that is killed keeps memory of a producer that lives, and makes an event for each; a pool needs neither, as it lives as
long as its worker. The driver's library is loaded wherever torch has a device, and its names are stable.

The driver says that freeing memory which others have open is undefined. So a pool is never freed before its
process ends (pdmesh/engine/kv_cache/pool.py drops it into torch's cache of segments at most), and a mapping is used only for a
peer whose connection is open. It says nothing about a process that ends; reports say that the memory stays until the last
process that has it open closes it, so mappings are kept for seconds only (kvtransfer/transports/common.py).

Expandable segments of torch's allocator have no such handles: `show` reports that.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

# Calls of CUDA's driver for what torch has no call for


class CudaError(RuntimeError):
    """A call of the driver failed."""


class Driver:
    """libcuda, with a device's primary context, which is torch's. Raises OSError, CudaError."""

    def __init__(self, ordinal: int) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")
        self.call("cuInit", 0)
        self.device = self.device_of(ordinal)
        self._context = ctypes.c_void_p()
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), self.device)  # retained until the process ends

    def call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._library, name)(*arguments)
        if code:
            said = ctypes.c_char_p()
            self._library.cuGetErrorName(code, ctypes.byref(said))
            raise CudaError(f"{name}: {(said.value or b'error').decode()} ({code})")

    @contextmanager
    def current(self) -> Iterator[None]:
        """Make the context current: this thread may not have used the device before."""
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
        """Return beginning and bytes of the allocation around `address`."""
        begin, size = ctypes.c_uint64(), ctypes.c_size_t()
        self.call("cuMemGetAddressRange_v2", ctypes.byref(begin), ctypes.byref(size), ctypes.c_uint64(address))
        return begin.value, size.value


# How a pool on a device is shared with other processes of the host, and how their pools are opened here
#
# The implementation in use is CudaSharing. Tests have one over shared memory of the host, so that everything around it runs
# without a GPU.


@dataclass(frozen=True)
class PoolHandle:
    """What another process needs to open a pool. handle: that of the pool's allocation, `offset`: bytes from its beginning;
    device: identifies the device, the same in all processes."""

    handle: bytes
    offset: int
    device: bytes


class NotShared(ValueError):
    """A pool cannot be shared, or another's cannot be opened, here. `field` of its handle is the reason."""

    def __init__(self, field: str, why: str) -> None:
        super().__init__(f"{field}: {why}")
        self.field = field
        self.why = why


class OpenPool(Protocol):
    """Another process's pool. The process that has opened it never writes to it."""

    @property
    def bytes(self) -> Tensor:
        """Return [num_bytes] uint8. Changes by the owner are visible; a reader has to verify what it has copied."""
        ...

    def close(self) -> None:
        """Close the pool. No copy may be under way; idempotent."""
        ...


class PoolSharing(Protocol):
    def show(self, pool: Tensor) -> PoolHandle:
        """Return the handle of `pool`. Raises NotShared."""
        ...

    def open(self, handle: PoolHandle, num_bytes: int) -> OpenPool:
        """Open a peer's pool, from any thread; may take milliseconds. Raises NotShared."""
        ...


HANDLE_BYTES = 64
_LAZY_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS, the only flag
_DEVICE_ORDINAL, _IS_IPC_CAPABLE = 9, 10  # CUpointer_attribute

logger = logging.getLogger(__name__)


class _Handle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_char * HANDLE_BYTES)]


class CudaSharing:
    """Share pools of one device. Satisfies PoolSharing."""

    def __init__(self, device: torch.device) -> None:
        """Raise NotShared where the device cannot share memory."""
        self._ordinal = torch.cuda.current_device() if device.index is None else device.index
        try:
            self._driver = Driver(self._ordinal)
        except (OSError, AttributeError, CudaError) as error:
            raise NotShared("device", f"the driver's library is of no use: {error}") from error

    def show(self, pool: Tensor) -> PoolHandle:
        driver, address, handle = self._driver, pool.data_ptr(), _Handle()
        try:
            with driver.current():
                if not driver.attribute(_IS_IPC_CAPABLE, address):
                    why = "the pool's memory has no handle that others could open; torch's expandable segments have none"
                    raise NotShared("handle", why)
                begin, _ = driver.extent(address)
                driver.call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(begin))
                return PoolHandle(bytes(handle), address - begin, driver.uuid(driver.device))
        except (CudaError, AttributeError) as error:
            raise NotShared("handle", f"the driver makes none: {error}") from error

    def open(self, handle: PoolHandle, num_bytes: int) -> CudaPool:
        if len(handle.handle) != HANDLE_BYTES:
            raise NotShared("handle", f"{len(handle.handle)} bytes are not CUDA's {HANDLE_BYTES}")
        address, source = ctypes.c_uint64(), _Handle.from_buffer_copy(handle.handle)
        try:
            self._check_reach(handle.device)
            with self._driver.current():
                self._driver.call("cuIpcOpenMemHandle_v2", ctypes.byref(address), source, _LAZY_PEER_ACCESS)
        except CudaError as error:
            raise NotShared("handle", f"the driver does not open it: {error}") from error
        return CudaPool(self._driver, address.value, handle.offset, num_bytes)

    def _check_reach(self, theirs: bytes) -> None:
        """Raise NotShared for a device that is not ours, nor a visible one whose memory ours can read."""
        driver = self._driver
        if driver.uuid(driver.device) == theirs:
            return
        for ordinal in range(driver.num_devices()):
            peer, can = driver.device_of(ordinal), ctypes.c_int()
            if driver.uuid(peer) == theirs:
                driver.call("cuDeviceCanAccessPeer", ctypes.byref(can), driver.device, peer)
                if can.value:
                    return
                raise NotShared("device", "ours cannot read the memory of the sender's")
        raise NotShared("device", "the sender's is not visible to this process")


class CudaPool:
    """A peer's pool, opened by the driver. Satisfies OpenPool."""

    def __init__(self, driver: Driver, address: int, offset: int, num_bytes: int) -> None:
        """Own what was opened at `address`. Raises NotShared for a pool that is not within it, or that cannot be viewed."""
        self._driver = driver
        self._address: int | None = address
        self._bytes: Tensor | None = None
        try:
            with driver.current():
                begin, size = driver.extent(address)
                ordinal = driver.attribute(_DEVICE_ORDINAL, address)
            if offset + num_bytes > begin + size - address:
                raise NotShared("offset", f"a pool of {num_bytes} bytes at {offset} leads out of {size} bytes")
            self._bytes = torch.as_tensor(_Array(address + offset, num_bytes), device=torch.device("cuda", ordinal))
        except CudaError as error:
            self.close()
            raise NotShared("handle", f"what was opened cannot be looked at: {error}") from error
        except BaseException:
            self.close()
            raise

    @property
    def bytes(self) -> Tensor:
        assert self._bytes is not None, "the pool is closed"
        return self._bytes

    def close(self) -> None:
        if self._address is None:
            return
        address, self._address, self._bytes = self._address, None, None
        try:
            with self._driver.current():
                self._driver.call("cuIpcCloseMemHandle", ctypes.c_uint64(address))
        except CudaError as error:
            logger.warning("cannot close another worker's KV pool: %s", error)


class _Array:
    """Memory that torch views in place: its tensor keeps this alive, and frees nothing."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }
