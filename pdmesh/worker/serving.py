"""Pause, sleep and wake of a worker: it stays registered, with its process, connections and identity.

                 SetServing(PAUSED)                   SetServing(ASLEEP)
    RUNNING ─────────────────────────► PAUSED ─────────────────────────► ASLEEP       memory given back
       ▲  requests stay where they are   │ ▲   requests given up: routers   │
       └───────── RUNNING ───────────────┘ └── place them again ── PAUSED ──┘  or RUNNING: memory taken again

Routers read the state in the heartbeats and send nothing new to a worker that does not run. What is on its way there is refused
(`RoleGate`) and waits in its router.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from pdmesh.engine.errors import InvalidState, SleepRefused
from pdmesh.runtime.errors import FailedPrecondition, InvalidArgument, Unavailable
from pdmesh.v1 import worker_pb2
from pdmesh.worker.engines.base import WorkerEngine
from pdmesh.worker.roles import RoleGate, ServingState

DEFAULT_FINISH_S = 30.0
MAX_FINISH_MS = 24 * 3600 * 1000
RELEASE_S = 10.0
"""How long a worker that goes to sleep waits until nobody reads its blocks any more."""
_RUNNING, _PAUSED, _ASLEEP = (
    worker_pb2.SERVING_STATE_RUNNING,
    worker_pb2.SERVING_STATE_PAUSED,
    worker_pb2.SERVING_STATE_ASLEEP,
)

logger = logging.getLogger(__name__)


class WorkerServing:
    """Change the state of one worker, one change at a time. The gate holds the state: all who take requests ask it."""

    def __init__(
        self,
        engine: WorkerEngine,
        gate: RoleGate,
        *,
        changed: Callable[[], None],
        finish: Callable[[float], Awaitable[bool]],
        give_up: Callable[[], Awaitable[None]],
        flush: Callable[[], Awaitable[None]],
        num_requests: Callable[[], int],
    ) -> None:
        """`changed` is called when the state has changed; `finish(seconds)` waits for the end of all requests and returns whether
        they have ended; `give_up` ends them, and routers place them again; `flush` ends the reading of blocks by tiers."""
        self._engine, self._gate, self._changed = engine, gate, changed
        self._finish, self._give_up, self._flush, self._num_requests = finish, give_up, flush, num_requests
        self._one_at_a_time = asyncio.Lock()

    async def set(self, request: worker_pb2.SetServingRequest) -> worker_pb2.SetServingResponse:
        """Serve SetServing. Raises MeshError."""
        if request.state not in (_RUNNING, _PAUSED, _ASLEEP):
            raise InvalidArgument("state", f"{request.state} is none of RUNNING, PAUSED and ASLEEP")
        if request.timeout_ms > MAX_FINISH_MS:
            raise InvalidArgument("timeout_ms", f"{request.timeout_ms} is more than a day ({MAX_FINISH_MS})")
        finish_s = (request.timeout_ms / 1000 or DEFAULT_FINISH_S) if request.finish_running else 0.0
        # In a task of its own: a caller that leaves must not end a change half-way.
        return await asyncio.shield(asyncio.create_task(self._set(request.state, finish_s), name="serving"))

    async def _set(self, state: ServingState, finish_s: float) -> worker_pb2.SetServingResponse:
        async with self._one_at_a_time:
            if self._gate.draining:
                raise FailedPrecondition("state", "this worker is about to stop")
            freed, began, before = 0, time.monotonic(), self._gate.serving
            if state == _ASLEEP:
                freed = await self._fall_asleep(finish_s)
            else:
                await self._wake()
                if state == _PAUSED:
                    await self._pause(finish_s)
                else:
                    await self._engine.resume()
                    self._enter(_RUNNING)
            name = worker_pb2.ServingState.Name
            if state != before:
                text = "%s -> %s in %.2f s; %d MB of memory given back"
                logger.info(text, name(before), name(state), time.monotonic() - began, freed >> 20)
            num_requests = 0 if state == _RUNNING else self._num_requests()
            return worker_pb2.SetServingResponse(state=state, freed_bytes=freed, num_requests=num_requests)

    async def _pause(self, finish_s: float) -> None:
        was_running = self._gate.serving == _RUNNING
        self._enter(_PAUSED)
        if finish_s and was_running:
            await self._finish(finish_s)
        await self._engine.pause()

    async def _fall_asleep(self, finish_s: float) -> int:
        before = self._gate.serving
        if before == _ASLEEP:
            return 0
        self._enter(_ASLEEP)
        try:
            if before != _RUNNING or not finish_s or not await self._finish(finish_s):
                await self._give_up()
            await self._flush()
            await self._engine.pause()
            return await self._released()
        except BaseException as error:
            if before == _RUNNING:
                await self._engine.resume()
            self._enter(before)
            if isinstance(error, SleepRefused):
                raise FailedPrecondition("state", str(error).removeprefix("state: ")) from error
            raise

    async def _released(self) -> int:
        """Give the memory back once nobody reads it: another worker may be fetching blocks. Raises Unavailable, SleepRefused."""
        loop = asyncio.get_running_loop()
        last = loop.time() + RELEASE_S
        while True:
            try:
                return await self._engine.fall_asleep()
            except InvalidState as error:
                if loop.time() > last:
                    raise Unavailable(f"the worker cannot sleep: {error}; try again", retry_delay_s=1.0) from error
            await asyncio.sleep(0.05)

    async def _wake(self) -> None:
        """Take the memory again. Raises Unavailable, and the worker stays asleep."""
        if self._gate.serving != _ASLEEP:
            return
        try:
            await self._engine.wake()
        except (ValueError, OSError) as error:
            raise Unavailable(f"the worker cannot wake: its weights cannot be read ({error})", retry_delay_s=1.0) from error

    def _enter(self, state: ServingState) -> None:
        if state != self._gate.serving:
            self._gate.serving = state
            self._changed()
