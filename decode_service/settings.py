"""Times of the decode service, in seconds."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class StreamSettings:
    """Seconds. A router silent for `stream_timeout_s` has a broken stream; one without a stream for `grace_s` is gone."""

    stream_timeout_s: float = 1.0
    grace_s: float = 2.0
    report_period_s: float = 0.2


@dataclass(frozen=True)
class ReservationSettings:
    """Seconds. Finished output is kept for `keep_output_s`: longer than a router may take to come back for it."""

    lease_s: float = 5.0
    keep_output_s: float = 4.0
    retry_delay_s: float = 0.1


@dataclass(frozen=True)
class DecodeSettings:
    """Times of the decode service, in seconds."""

    stream: StreamSettings = field(default_factory=StreamSettings)
    reservation: ReservationSettings = field(default_factory=ReservationSettings)
