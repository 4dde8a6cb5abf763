"""The requests that run on this router, by the caller's id, so that Abort finds them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager

import grpc

from pdmesh.runtime.errors import MeshError
from pdmesh.v1 import mesh_pb2
from router.auth import identity


class AbortedByCaller(Exception):
    """Somebody called Abort with this request's id."""


class Run:
    """One call of Generate, in its own task."""

    def __init__(self) -> None:
        self._task = asyncio.current_task()
        self._waiting = False
        self._aborted = False

    async def next(self, messages: AsyncGenerator[mesh_pb2.GenerateResponse, None]) -> mesh_pb2.GenerateResponse | None:
        """The next message; None after the last. Raises AbortedByCaller."""
        if self._aborted:
            raise AbortedByCaller
        self._waiting = True
        try:
            return await anext(messages, None)
        except asyncio.CancelledError:
            if not self._aborted or self._task is None or self._task.uncancel():
                raise  # the client has left, too
            raise AbortedByCaller from None
        finally:
            self._waiting = False

    def abort(self) -> None:
        """End it: at once where it waits for the mesh, else with the message that it is just sending. A task that is cancelled
        while it sends could not tell gRPC how the call ends."""
        if self._aborted:
            return
        self._aborted = True
        if self._waiting and self._task is not None:
            self._task.cancel()


class Running:
    """Calls of Generate. On one event loop. Ids are the callers' own: each tenant has its names to itself."""

    def __init__(self) -> None:
        self._runs: dict[tuple[str | None, str], Run] = {}

    @contextmanager
    def enter(self, request_id: str) -> Iterator[Run]:
        """While the calling task serves a request; an empty id is never found. Raises MeshError (ALREADY_EXISTS)."""
        key = (identity.tenant(), request_id)
        if key in self._runs:
            problem = f"request_id: {request_id[:100]!r} runs already; abort it or choose another"
            raise MeshError(problem, code=grpc.StatusCode.ALREADY_EXISTS, field="request_id")
        run = Run()
        if request_id:
            self._runs[key] = run
        try:
            yield run
        finally:
            self._runs.pop(key, None)

    def abort(self, request_id: str) -> None:
        """One that is not there has ended already, or runs on another router."""
        run = self._runs.get((identity.tenant(), request_id))
        if run is not None:
            run.abort()
