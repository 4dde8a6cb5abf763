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
import random
import time
from collections.abc import Awaitable, Callable

from pdmesh.engine.errors import InvalidState, SleepRefused
from pdmesh.runtime.errors import Aborted, FailedPrecondition, InvalidArgument, Unavailable
from pdmesh.v1 import worker_pb2
from pdmesh.worker.engines.base import WorkerEngine
from pdmesh.worker.roles import RoleGate, ServingState

DEFAULT_FINISH_S = 30.0
MAX_FINISH_MS = 24 * 3600 * 1000
RELEASE_S = 70.0
"""How long a worker that goes to sleep waits for those that read its blocks: a push to another worker takes a minute at most."""
_RUNNING, _PAUSED, _ASLEEP = (
    worker_pb2.SERVING_STATE_RUNNING,
    worker_pb2.SERVING_STATE_PAUSED,
    worker_pb2.SERVING_STATE_ASLEEP,
)

logger = logging.getLogger(__name__)


class WorkerServing:
    """Change the state of one worker, one change at a time. The gate holds the state: what takes requests asks it."""

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
        self.one_at_a_time = asyncio.Lock()  # held by a change of weights as well
        self._num_calls = 0
        self._overtaken = asyncio.Event()  # set when another change comes while one waits for requests to end
        self.is_computing = True

    @property
    def is_asleep(self) -> bool:
        """Return whether the worker is asleep, or goes to sleep."""
        return self._gate.serving == _ASLEEP

    @property
    def is_finishing(self) -> bool:
        """Return whether requests are to end before it pauses or sleeps."""
        return self.is_computing and not self._gate.is_running

    async def set(self, request: worker_pb2.SetServingRequest) -> worker_pb2.SetServingResponse:
        """Serve SetServing. Raises MeshError."""
        if request.state not in (_RUNNING, _PAUSED, _ASLEEP):
            raise InvalidArgument("state", f"{request.state} is none of RUNNING, PAUSED and ASLEEP")
        if request.timeout_ms > MAX_FINISH_MS:
            raise InvalidArgument("timeout_ms", f"{request.timeout_ms} is more than a day ({MAX_FINISH_MS})")
        if request.abort_running and (request.finish_running or request.state == _RUNNING):
            other = "finish_running" if request.finish_running else "RUNNING"
            raise InvalidArgument("abort_running", f"it does not go with {other}; give it with PAUSED or ASLEEP alone")
        abort_id = request.abort_id or random.getrandbits(63) + 1 if request.abort_running else 0
        finish_s = (request.timeout_ms / 1000 or DEFAULT_FINISH_S) if request.finish_running else 0.0
        self._num_calls += 1
        self._overtaken.set()  # a change that waits for requests to end does not keep this one waiting
        # In a task of its own: a caller that leaves must not end a change half-way.
        change = self._set(request.state, finish_s, abort_id, self._num_calls)
        return await asyncio.shield(asyncio.create_task(change, name="serving"))

    async def _set(self, state: ServingState, finish_s: float, abort_id: int, number: int) -> worker_pb2.SetServingResponse:
        async with self.one_at_a_time:
            if self._gate.draining:
                raise FailedPrecondition("state", "this worker is about to stop")
            if number == self._num_calls:  # else a later one waits already
                self._overtaken.clear()
            freed, began, before = 0, time.monotonic(), self._gate.serving
            if state == _ASLEEP:
                freed = await self._fall_asleep(finish_s)
            else:
                await self._wake()
                if state == _PAUSED:
                    await self._pause(finish_s)
                else:
                    await self._compute()
                    self._enter(_RUNNING)
            if abort_id:
                self._gate.abort_id = abort_id
                self._changed()
            name = worker_pb2.ServingState.Name
            if state != before:
                text = "%s -> %s in %.2f s; %d MB of memory given back"
                logger.info(text, name(before), name(state), time.monotonic() - began, freed >> 20)
            num_requests = 0 if state == _RUNNING else self._num_requests()
            return worker_pb2.SetServingResponse(state=state, freed_bytes=freed, num_requests=num_requests)

    async def _pause(self, finish_s: float) -> None:
        was_computing, before = self.is_computing, self._gate.serving
        self._enter(_PAUSED)
        try:
            if finish_s and was_computing:
                await self._finished(finish_s)
        except BaseException:
            self._enter(before)
            raise
        await self._stop_computing()

    async def _fall_asleep(self, finish_s: float) -> int:
        before = self._gate.serving
        if before == _ASLEEP:
            return 0
        was_computing = self.is_computing
        try:
            self._engine.check_sleep()  # before any request is given up for nothing
            self._enter(_ASLEEP)
            if was_computing and finish_s:
                await self._finished(finish_s)
            await self._stop_computing()  # else what is given up would be released behind the step that computes it
            self._gate.gives_up = True
            while self._num_requests():
                await self._give_up()
            await self._flush()
            return await self._released()
        except BaseException as error:
            if was_computing:
                await self._compute()
            self._enter(before)
            if isinstance(error, SleepRefused):
                raise FailedPrecondition("state", str(error).removeprefix("state: ")) from error
            raise
        finally:
            self._gate.gives_up = False

    async def _finished(self, finish_s: float) -> None:
        """Wait for the end of all requests. Raises Aborted when another change comes meanwhile."""
        finishing, overtaken = asyncio.ensure_future(self._finish(finish_s)), asyncio.ensure_future(self._overtaken.wait())
        try:
            await asyncio.wait((finishing, overtaken), return_when=asyncio.FIRST_COMPLETED)
            if not finishing.done():
                raise Aborted("another SetServing came while this one waited for requests to end")
            if self._gate.draining:
                raise FailedPrecondition("state", "this worker is about to stop")
        finally:
            finishing.cancel()
            overtaken.cancel()

    async def _stop_computing(self) -> None:
        await self._engine.pause()
        self.is_computing = False

    async def _compute(self) -> None:
        await self._engine.resume()
        self.is_computing = True

    async def _released(self) -> int:
        """Give the memory back once it is not read: another worker may be fetching blocks. Raises Unavailable, SleepRefused."""
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
