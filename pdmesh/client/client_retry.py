"""When a broken call is tried again, and where: pure decisions, the clock is passed in."""

from __future__ import annotations

from dataclasses import dataclass

from pdmesh.errors import Cancelled, DeadlineExceeded, MeshError, Overloaded, Unavailable


@dataclass(frozen=True)
class RetryPolicy:
    """How patient a client is.

    `resume_timeout_s` bounds how long it looks for a router since the last sign of life of one; a request's own deadline
    bounds it too. With `retry_overload` a refused request is tried again after the delay that the router named.
    """

    resume_timeout_s: float = 30.0
    retry_overload: bool = False
    first_backoff_s: float = 0.05
    max_backoff_s: float = 2.0


def unasked(error: MeshError) -> MeshError:
    """`error` of a call that its caller has not cancelled: CANCELLED is then a router or a proxy that shuts down."""
    return Unavailable(f"the router cancelled the call: {error.message}") if isinstance(error, Cancelled) else error


class Retrier:
    """One call's attempts. `address` is the index of the router to ask next.

    Routers are tried in turn: a failure moves on to the next at once, and backs off (doubling) after each full round.
    """

    def __init__(self, policy: RetryPolicy, num_addresses: int, address: int, now: float, timeout_s: float | None) -> None:
        self._policy = policy
        self._num_addresses = num_addresses
        self._deadline = None if timeout_s is None else now + timeout_s
        self._last_sign_of_life = now
        self._num_failures = 0
        self.address = address

    def time_left(self, now: float) -> float | None:
        """Seconds until the deadline, at least 0; None without one."""
        return None if self._deadline is None else max(0.0, self._deadline - now)

    def progressed(self, now: float) -> None:
        """A router answered: the next failure is a new one."""
        self._last_sign_of_life = now
        self._num_failures = 0

    def failed(self, error: MeshError, now: float, *, resuming: bool = False) -> float:
        """Seconds to wait before the next attempt, at `address`. Raises `error` when there is to be none, DeadlineExceeded
        when the deadline comes first. A refusal without a delay is final: the request may be too large for ever.

        `resuming`: part of the answer has been handed out. Its admission was paid once, so a refusal is waited out like the
        loss that it follows from.
        """
        if isinstance(error, Unavailable):
            delay = self._backoff_s()
        elif isinstance(error, Overloaded) and error.retry_delay_s is not None and (self._policy.retry_overload or resuming):
            delay = error.retry_delay_s
        else:
            raise error
        self._check_limits(error, now + delay, now)
        self._num_failures += 1
        self.address = (self.address + 1) % self._num_addresses
        return delay

    def _backoff_s(self) -> float:
        num_rounds = (self._num_failures + 1) // self._num_addresses
        if num_rounds == 0:
            return 0.0
        return float(min(self._policy.max_backoff_s, self._policy.first_backoff_s * 2 ** min(num_rounds - 1, 16)))

    def _check_limits(self, error: MeshError, retry_at: float, now: float) -> None:
        if self._deadline is not None and retry_at >= self._deadline:
            raise DeadlineExceeded(f"the deadline comes before another attempt; the last one failed: {error.message}") from error
        waits_by_deadline = isinstance(error, Overloaded) and self._deadline is not None
        if not waits_by_deadline and retry_at > self._last_sign_of_life + self._policy.resume_timeout_s:
            raise error
