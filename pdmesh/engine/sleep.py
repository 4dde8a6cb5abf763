"""Sleep: an engine without requests gives the memory of its KV and weights back, and takes it again when it wakes.

    fall_asleep   prefix cache forgotten ─► pool given back ─► weights given back, where a file of packed weights has them
    wake          weights read again ─► pages of the pool touched

Addresses stay, so nothing that holds one has to be told: kernels, tables of a step, transports.
"""

from __future__ import annotations

from pdmesh.engine.errors import InvalidState, SleepRefused
from pdmesh.engine.kernels.cpu.model import NativeModel
from pdmesh.engine.kv_cache.block_manager import BlockManager
from pdmesh.engine.kv_cache.pool import KVPool
from pdmesh.engine.loader.packed_memory import ReleasedWeights, releasable
from pdmesh.engine.models.decoder import DecoderModel
from pdmesh.engine.weight_versions import WeightVersions


class EngineSleep:
    """Give memory back and take it again, between two steps, of which there are none while the engine is asleep."""

    def __init__(self, kv: KVPool, allocator: BlockManager, versions: WeightVersions) -> None:
        self._kv, self._allocator, self._versions = kv, allocator, versions
        self._released: ReleasedWeights | None = None
        self.is_asleep = False

    def rest(self) -> None:
        """Give borrowed cores back: no step follows for a while."""
        model = self._versions.current.model
        if isinstance(model, NativeModel):
            model.rest()

    def check(self) -> None:
        """Raise SleepRefused where this engine cannot sleep, whatever it does now."""
        if not isinstance(self._versions.current.model, NativeModel | DecoderModel) or self._kv.tensor.device.type != "cpu":
            raise SleepRefused("state: an engine on a GPU or of several ranks cannot sleep; pause it, or stop the worker")

    def fall_asleep(self) -> int:
        """Give the memory back; return the bytes. Again, it does nothing. Raises SleepRefused: this engine cannot; InvalidState:
        blocks are in use."""
        self.check()
        if self.is_asleep:
            return 0
        with self._allocator.lock:
            pool = self._allocator.pool
            if pool.num_free != pool.num_total:
                raise InvalidState(f"{pool.num_total - pool.num_free} KV blocks are in use")
            pool.forget_all()  # first: no hash may name a block whose content is gone
            self._versions.drop_earlier()
            pool.is_closed = True  # what asks for blocks now finds none
        try:
            freed = self._kv.forget()  # without the lock: it takes a second for tens of GB
        except OSError as error:
            raise SleepRefused(f"state: the KV pool cannot be given back ({error.strerror}); pause the worker") from error
        finally:
            pool.is_closed = False
        self.is_asleep = True
        model = self._versions.current.model
        self._released = releasable(model.weights) if isinstance(model, NativeModel) else None
        if self._released is None:
            return freed
        self._released.forget()
        return freed + self._released.num_bytes

    def wake(self) -> None:
        """Take the memory again; idempotent. Raises OSError or UnusableFile when the weights cannot be read: it stays asleep."""
        if not self.is_asleep:
            return
        if self._released is not None:
            self._released.restore()
            self._released = None
        self._kv.touch()
        self.is_asleep = False

    def close(self) -> None:
        """Close what was to be read again, before the engine ends; idempotent."""
        if self._released is not None:
            self._released.close()
            self._released = None
