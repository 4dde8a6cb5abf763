"""The adapters of one engine: which are loaded, in which slot, and which requests still use them. Changes come between steps;
`may_have` is asked while one runs, and looks up one key.

    load ──► LOADED ──unload──► LEAVING: no new request may have it ──its last request ends──► gone, the slot is free

Unloading never ends a request. An adapter of the same name may be loaded while the old one leaves: requests hold an `AdapterId`,
which says also what is in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

from pdmesh.adapter_id import AdapterId
from pdmesh.engine.errors import AdapterRefused
from pdmesh.engine.lora.adapter import Adapter


class AdapterSlots(Protocol):
    """A model's side: where the weights of adapters lie."""

    def put(self, slot: int, adapter: Adapter) -> None: ...
    def drop(self, slot: int) -> None: ...


class AdapterRegistry:
    """Hold the adapters of an engine. `leaving` were unloaded, and requests may still use them."""

    def __init__(self, max_loras: int, slots: AdapterSlots | None, in_use: Callable[[], Iterable[AdapterId | None]]) -> None:
        """`slots`: the model's places, None: it has none. `in_use` returns the adapters of all requests in the engine."""
        self._max_loras = max_loras
        self._model = slots
        self._in_use = in_use
        self._slots: dict[AdapterId, int] = {}
        self._ranks: dict[AdapterId, int] = {}
        self.leaving: set[AdapterId] = set()

    @property
    def can_load(self) -> bool:
        """Return whether the model has places for adapters."""
        return self._model is not None

    @property
    def slots(self) -> Mapping[AdapterId, int]:
        """Return the slot of each adapter that a step may need."""
        return self._slots

    @property
    def loaded(self) -> tuple[AdapterId, ...]:
        """Return the adapters that requests may ask for, by name."""
        return tuple(sorted(self._slots.keys() - self.leaving))

    def rank_of(self, adapter: AdapterId) -> int:
        return self._ranks[adapter]

    def load(self, adapter: Adapter) -> None:
        """Load; again, it changes nothing. Raises AdapterRefused: the name is taken by another content, or there is no slot."""
        if self._model is None:
            raise AdapterRefused(
                f"adapter {adapter.id.name!r}: this worker has no room for adapters; start it with --max-loras 8"
            )
        same = next((known for known in self.loaded if known.name == adapter.id.name), None)
        if same is not None and same != adapter.id:
            raise AdapterRefused(
                f"adapter {adapter.id.name!r} is loaded with other weights; unload it first, or choose another name"
            )
        if adapter.id in self._slots:
            self.leaving.discard(adapter.id)
            return
        slot = next((number for number in range(self._max_loras) if number not in self._slots.values()), None)
        if slot is None:
            waiting = f", of which {len(self.leaving)} wait for their last requests" if self.leaving else ""
            raise AdapterRefused(
                f"adapter {adapter.id.name!r}: all {self._max_loras} places are taken{waiting}; unload one, or raise --max-loras"
            )
        self._model.put(slot, adapter)
        self._slots[adapter.id] = slot
        self._ranks[adapter.id] = adapter.rank

    def unload(self, name: str) -> int | None:
        """Refuse new requests with this adapter, and free it when its last request ends. Return how many use it; None: there is
        none of that name."""
        adapter = next((known for known in self.loaded if known.name == name), None)
        if adapter is None:
            return None
        self.leaving.add(adapter)
        num_requests = sum(other == adapter for other in self._in_use())
        self.sweep()
        return num_requests

    def sweep(self) -> None:
        """Free those of `leaving` that no request uses any more."""
        for adapter in self.leaving.difference(self._in_use()):
            assert self._model is not None
            self._model.drop(self._slots.pop(adapter))
            del self._ranks[adapter]
            self.leaving.discard(adapter)

    def may_have(self, adapter: AdapterId) -> bool:
        """Return whether a new request may have it."""
        return adapter in self._slots and adapter not in self.leaving
