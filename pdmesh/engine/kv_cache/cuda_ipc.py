"""CUDA's handles of memory (cuIpcGetMemHandle), by the driver's own library.

Why the driver and not torch's sharing of storages: that one counts references in a file of shared memory, through which a
consumer that is killed keeps memory of a producer that lives, and makes an event for each; a pool needs neither, as it lives as
long as its worker. The driver's library is loaded wherever torch has a device, and its names are stable.

What the driver says of owners that go: to free memory that others have open is undefined. So a pool is never freed before its
process ends (engine/kv_cache.py drops it into torch's cache of segments at most), and a mapping is used only for a peer whose
connection is open. Of a process that ends it says nothing; others have seen that the memory stays until the last one that has it
open closes it, which is why mappings are kept for seconds only (kvtransfer/transports/kept_pools.py).

Expandable segments of torch's allocator have no such handles: `show` says so.
"""

from __future__ import annotations

import ctypes
import logging

import torch
from torch import Tensor

from pdmesh.engine.kv_cache.cuda_driver import CudaError, Driver
from pdmesh.engine.kv_cache.pool_sharing import NotShared, PoolHandle

HANDLE_BYTES = 64
_LAZY_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS, the only flag there is
_DEVICE_ORDINAL, _IS_IPC_CAPABLE = 9, 10  # CUpointer_attribute

logger = logging.getLogger(__name__)


class _Handle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_char * HANDLE_BYTES)]


class CudaSharing:
    """Of one device. Satisfies pdmesh.engine.kv_cache.pool_sharing.PoolSharing."""

    def __init__(self, device: torch.device) -> None:
        """Raises NotShared."""
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
        """Raises NotShared for a device that is not ours, nor one in sight whose memory ours reads."""
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
    """Satisfies pdmesh.engine.kv_cache.pool_sharing.OpenPool."""

    def __init__(self, driver: Driver, address: int, offset: int, num_bytes: int) -> None:
        """Owns what was opened at `address`. Raises NotShared for a pool that leads out of it, or that cannot be looked at."""
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
    """Memory that torch may look at in place: its tensor keeps this alive, and frees nothing."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }
