"""What is kept of a finished request. Times are seconds since the start of the run, on a monotonic clock."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from itertools import pairwise


class Outcome(Enum):
    """How a request ended."""

    OK = "ok"
    # The plan wanted it so.
    CANCELLED = "cancelled"
    # The target said that it had no room.
    REFUSED = "refused"
    TIMEOUT = "timeout"
    ERROR = "error"
    # Due while as many as the load test may have were running: it never waits for one of them to end.
    NOT_SENT = "not_sent"
    # The load test itself was interrupted; does not count.
    ABORTED = "aborted"


@dataclass(frozen=True, slots=True)
class Record:
    """One request. Latencies count from `scheduled_s`, when it was due, so that a target that stalls (or a load test that is
    late) is seen in all the requests that it made wait. `token_times` has a time for each message that carried tokens."""

    session: int
    turn: int
    traffic_class: str
    tenant: str
    priority: str
    scheduled_s: float
    sent_s: float
    end_s: float
    outcome: Outcome
    input_tokens: int
    output_tokens: int
    cached_tokens: int = 0
    token_times: array[float] = field(default_factory=lambda: array("d"))
    error: str = ""
    # Where the server says that the time went, in milliseconds, in order; empty where it says nothing.
    phases_ms: Mapping[str, float] = field(default_factory=dict)
    workers: str = ""

    @property
    def lateness_s(self) -> float:
        """How late the load test itself was."""
        return self.sent_s - self.scheduled_s

    @property
    def ttft_s(self) -> float | None:
        """From when it was due to its first token."""
        return self.token_times[0] - self.scheduled_s if self.token_times else None

    @property
    def ttft_from_sent_s(self) -> float | None:
        """From when it was sent to its first token: what a load test that forgets its own delays would report."""
        return self.token_times[0] - self.sent_s if self.token_times else None

    @property
    def tpot_s(self) -> float | None:
        """Mean time per token after the first; None below two tokens."""
        if self.output_tokens < 2 or len(self.token_times) < 2:
            return None
        return (self.token_times[-1] - self.token_times[0]) / (self.output_tokens - 1)

    @property
    def e2e_s(self) -> float | None:
        """From when it was due to its last token, if it was answered in full."""
        return self.token_times[-1] - self.scheduled_s if self.outcome is Outcome.OK and self.token_times else None

    @property
    def gaps_s(self) -> list[float]:
        """Times between one message with tokens and the next (ITL)."""
        return [later - earlier for earlier, later in pairwise(self.token_times)]
