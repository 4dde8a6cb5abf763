"""Where a request's time in the engine went, until it started. Monotonic nanoseconds."""

from __future__ import annotations

from pdmesh.engine.outputs import PrefillTiming, RequestStarted


class StartClock:
    """Adds up waiting and computing until a request's first token (local) or first step (remote).

    Both parts are measured: a step that the request takes part in is compute, the time between such steps is queue. Together
    they are the whole time from opening the clock to the end of the step that started the request.
    """

    def __init__(self, now_ns: int, *, remote: bool) -> None:
        self._opened_ns = self._since_ns = now_ns
        self._remote = remote
        self._queue_ns = 0
        self._compute_ns = 0
        self._num_cached_tokens = 0
        self._num_computed_tokens = 0
        self._num_steps = 0
        self._is_running = True

    def took_part(self, started_ns: int, ended_ns: int, *, num_tokens: int, num_cached_tokens: int) -> None:
        """The request computed `num_tokens` tokens in this step, having found `num_cached_tokens` when it got its blocks."""
        if self._num_steps == 0:  # what is found later, after a preemption, is the request's own
            self._num_cached_tokens = num_cached_tokens
        self._queue_ns += started_ns - self._since_ns
        self._compute_ns += ended_ns - started_ns
        self._since_ns = ended_ns
        self._num_computed_tokens += num_tokens
        self._num_steps += 1

    def try_stop(self, request_id: str, *, drew_token: bool) -> RequestStarted | None:
        """Stops the clock if the request has now started, and says so once."""
        if not self._is_running or not (drew_token or self._remote):
            return None
        self._is_running = False
        if self._remote:
            return RequestStarted(request_id, timing=None, decode_queue_ns=self._queue_ns)
        return RequestStarted(request_id, self._prefill_timing(), decode_queue_ns=0)

    def _prefill_timing(self) -> PrefillTiming:
        return PrefillTiming(
            opened_ns=self._opened_ns,
            queue_ns=self._queue_ns,
            compute_ns=self._compute_ns,
            num_cached_tokens=self._num_cached_tokens,
            num_computed_tokens=self._num_computed_tokens,
            num_steps=self._num_steps,
        )
