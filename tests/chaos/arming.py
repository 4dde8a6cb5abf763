"""Failpoints of a process that runs: armed and disarmed through the file that it watches (`pdmesh.runtime.failpoints`)."""

from __future__ import annotations

import asyncio
from pathlib import Path

from pdmesh.runtime.failpoints import FILE_VARIABLE, HIT_SUFFIX

_POLL_PERIOD_S = 0.004


class Arming:
    """The failpoints of one worker, whichever process it is at the moment: one of each name, with its hits since it was armed."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._hits = Path(f"{file}{HIT_SUFFIX}")
        self._armed: dict[str, str] = {}
        self._hits_before: dict[str, int] = {}

    @property
    def environment(self) -> dict[str, str]:
        """What the process has to be started with."""
        return {FILE_VARIABLE: str(self._file)}

    def arm(self, name: str, action: str) -> None:
        """`name` does `action` (as `pdmesh.runtime.failpoints` reads it) from now on."""
        self._hits_before[name] = self._count(name)
        self._armed[name] = action
        self._write()

    def disarm(self, name: str) -> None:
        """`name` does nothing any more; idempotent. Its hits stay known."""
        if self._armed.pop(name, None) is not None:
            self._write()

    def disarm_all(self) -> None:
        """As `disarm`, of every name."""
        for name in list(self._armed):
            self.disarm(name)

    def was_hit(self, name: str) -> bool:
        """Has `name` acted since it was armed?"""
        return self._count(name) > self._hits_before.get(name, 0)

    async def until_hit(self, name: str, timeout_s: float) -> bool:
        """Waits until `name` has acted; False if it has not within `timeout_s`."""
        deadline = asyncio.get_running_loop().time() + timeout_s
        while not self.was_hit(name):
            if asyncio.get_running_loop().time() > deadline:
                return False
            await asyncio.sleep(_POLL_PERIOD_S)
        return True

    def _write(self) -> None:
        new = self._file.with_suffix(".new")
        new.write_text(",".join(f"{name}={action}" for name, action in self._armed.items()), encoding="ascii")
        new.replace(self._file)

    def _count(self, name: str) -> int:
        try:
            return self._hits.read_text(encoding="ascii").splitlines().count(name)
        except FileNotFoundError:
            return 0
