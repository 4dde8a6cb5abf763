"""LoRA adapters on vLLM: its own slots, under the names and digests that the mesh knows."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pdmesh.adapter_id import AdapterId
from pdmesh.engine.errors import AdapterRefused, UnknownAdapter
from pdmesh.engine.lora.folder import digest_of
from pdmesh.engine.request import EngineRequest

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest

    from pdmesh.engine.loop import EngineLoop
    from pdmesh.worker.engines.base import Loaded
    from pdmesh_vllm.core import VllmCore


class AdapterTable:
    """Hold the adapters that are loaded. Used on the engine's thread, and before it starts."""

    def __init__(self, max_adapters: int) -> None:
        self.max_adapters = max_adapters
        self._known: dict[AdapterId, tuple[LoRARequest, int]] = {}
        self._leaving: set[AdapterId] = set()
        self._serial = itertools.count(1)

    def of(self, request: EngineRequest) -> LoRARequest | None:
        """Return a request's adapter as vLLM takes it."""
        return None if request.adapter is None else self._known[request.adapter][0]

    def admit(self, request: EngineRequest) -> None:
        """Raise UnknownAdapter unless a new request may have the adapter that it names."""
        adapter = request.adapter
        if adapter is not None and (adapter not in self._known or adapter in self._leaving):
            raise UnknownAdapter(f"adapter: {adapter.name!r} is not loaded here (any more)")

    def loaded(self) -> Loaded:
        """Return those that requests may ask for, with their ranks."""
        return [(each, rank) for each, (_, rank) in sorted(self._known.items()) if each not in self._leaving]

    def load(self, core: VllmCore, adapter: AdapterId, folder: Path, rank: int) -> Loaded:
        """Load. Raises AdapterRefused."""
        from vllm.lora.request import LoRARequest

        self.sweep(core)
        same = next((each for each in self._known if each.name == adapter.name and each not in self._leaving), None)
        if same is not None and same != adapter:
            raise AdapterRefused(
                f"adapter {adapter.name!r} is loaded with other weights; unload it first, or choose another name"
            )
        if adapter in self._known:
            self._leaving.discard(adapter)
            return self.loaded()
        if len(self._known) >= self.max_adapters:
            raise AdapterRefused(
                f"adapter {adapter.name!r}: all {self.max_adapters} places are taken; unload one, or raise --max-loras"
            )
        lora = LoRARequest(adapter.name, next(self._serial), str(folder))
        try:
            core.core.add_lora(lora)
        except (ValueError, RuntimeError, OSError) as error:
            raise AdapterRefused(f"adapter {adapter.name!r}: vLLM refuses it: {error}") from error
        self._known[adapter] = (lora, rank)
        return self.loaded()

    def unload(self, core: VllmCore, name: str) -> int:
        """Take no new requests with it; return how many still run."""
        adapter = next((each for each in self._known if each.name == name and each not in self._leaving), None)
        if adapter is None:
            return 0
        self._leaving.add(adapter)
        num_running = core.uses(adapter)
        self.sweep(core)
        return num_running

    def sweep(self, core: VllmCore) -> None:
        """Free those that are leaving and that no request uses any more."""
        for adapter in [each for each in self._leaving if not core.uses(each)]:
            lora, _ = self._known.pop(adapter)
            self._leaving.discard(adapter)
            core.core.remove_lora(lora.lora_int_id)


class VllmAdapters:
    """Satisfy `EngineAdapters`."""

    def __init__(self, table: AdapterTable) -> None:
        self._table = table
        self.max_adapters = table.max_adapters
        self.at_start: Loaded = table.loaded()
        self.calls: EngineLoop[VllmCore] | None = None

    async def load(self, name: str, folder: Path) -> Loaded:
        adapter, rank = await asyncio.to_thread(described, name, folder)
        assert self.calls is not None, "the engine has not been opened"
        return await self.calls.call(lambda core: self._table.load(core, adapter, folder, rank))

    async def unload(self, name: str) -> int:
        assert self.calls is not None, "the engine has not been opened"
        return await self.calls.call(lambda core: self._table.unload(core, name))


def described(name: str, folder: Path) -> tuple[AdapterId, int]:
    """Return id and rank of the adapter in a folder. Raises ValueError or OSError about its files."""
    config = json.loads((folder / "adapter_config.json").read_text())
    rank = config.get("r") if isinstance(config, dict) else None
    if not isinstance(rank, int) or rank < 1:
        raise ValueError(f"adapter_config.json: r is {rank!r}; it must be a rank, 1 or more")
    return AdapterId(name, digest_of(folder)), rank


def load_all(core: VllmCore, table: AdapterTable, adapters: Sequence[tuple[str, Path]]) -> None:
    """Load adapters before the first step. Raises ValueError naming the adapter."""
    for name, folder in adapters:
        try:
            adapter, rank = described(name, folder)
            table.load(core, adapter, folder, rank)
        except (OSError, AdapterRefused) as error:
            raise ValueError(f"lora: {name}: {error}") from error
