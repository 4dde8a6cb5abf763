"""What one stream has handed to its caller so far, and the request that continues it.

    request ──► Started ──► Delta … Delta ──✗ router lost
                  │ seed       │ token ids
                  └────────────┴──► request + Resume(seed, emitted) ──► (Started) ──► Delta … ──► Completed

Tokens are a function of the request and its seed, and text is a function of the tokens, so a second router that is told
both goes on exactly where the first was. The checks here make that a promise to the caller: each index once, in order.
"""

from __future__ import annotations

from dataclasses import replace

from pdmesh.client.types import Completed, Delta, Event, FinishReason, Started
from pdmesh.client.wire import emitted_choice, event
from pdmesh.errors import Internal
from pdmesh.v1 import mesh_pb2

_MAX_REQUEST_ID = 64
_MAX_UINT32 = 2**32 - 1


class StreamSession:
    """History of one stream. Pure: no clock, no network."""

    def __init__(self, request: mesh_pb2.GenerateRequest | mesh_pb2.ChatRequest) -> None:
        self._request = request
        self._started: Started | None = None
        self._emitted: dict[int, list[int]] = {}
        self._finished: dict[int, FinishReason] = {}
        self._num_losses = 0
        self._num_legs = 0
        self.completed = False

    @property
    def resuming(self) -> bool:
        """Whether the caller has been given a part of the answer."""
        return self._started is not None

    def lost(self) -> None:
        """The router that served the stream is gone."""
        self._num_losses += 1

    def request(self, attempt: int) -> mesh_pb2.GenerateRequest | mesh_pb2.ChatRequest:
        """The request to send now, after it was sent `attempt` times: as given at first, behind what was received later."""
        if attempt == 0:
            return self._request
        request = type(self._request)()
        request.CopyFrom(self._request)  # type: ignore[arg-type]  # the same type on both sides
        request.options.attempt = min(request.options.attempt + attempt, _MAX_UINT32)
        if self._num_losses:
            request.options.request_id = self._next_request_id()
        if self._started is not None:
            request.resume.seed = self._started.seed
            request.resume.emitted.extend(
                emitted_choice(index, ids, self._finished.get(index)) for index, ids in sorted(self._emitted.items())
            )
        return request

    def _next_request_id(self) -> str:
        """A name of its own for each leg: workers may still hold the lost router's request, until their grace period ends."""
        first = self._request.options.request_id or (self._started.request_id if self._started else "")
        suffix = f"-r{self._num_losses}"
        return first[: _MAX_REQUEST_ID - len(suffix)] + suffix if first else ""

    def accept(self, response: mesh_pb2.GenerateResponse) -> Event | None:
        """The event for the caller; None when it has had it. Raises Internal when a router breaks the order of indexes."""
        item = event(response)
        if isinstance(item, Started):
            return self._accept_started(item)
        if isinstance(item, Delta):
            return self._accept_delta(item)
        if isinstance(item, Completed):
            self.completed = True
            return replace(item, num_resumes=self._num_legs - 1)
        return None

    def _accept_started(self, started: Started) -> Started | None:
        self._num_legs += 1
        if self._started is None:
            self._started = started
            return started
        if started.seed != self._started.seed:
            raise Internal(f"the stream was resumed with seed {started.seed}; it began with {self._started.seed}")
        return None

    def _accept_delta(self, delta: Delta) -> Delta | None:
        if delta.choice in self._finished:
            return None
        emitted = self._emitted.setdefault(delta.choice, [])
        if delta.token_ids and not self._is_next(delta, emitted):
            return None
        emitted.extend(delta.token_ids)
        if delta.finish_reason is not None:
            self._finished[delta.choice] = delta.finish_reason
        return delta

    def _is_next(self, delta: Delta, emitted: list[int]) -> bool:
        """Whether the delta continues the choice; False: it repeats. Anything else is an error: text cannot be cut."""
        end = delta.first_index + len(delta.token_ids)
        if delta.first_index == len(emitted):
            return True
        if end <= len(emitted) and tuple(emitted[delta.first_index : end]) == delta.token_ids:
            return False
        raise Internal(
            f"choice {delta.choice}: the router sent indexes {delta.first_index} to {end - 1} where {len(emitted)} is next;"
            " this is a bug of the router, please report it with the request id"
        )
