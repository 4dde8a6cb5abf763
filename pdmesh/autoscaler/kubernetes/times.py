"""Times as Kubernetes writes them (RFC 3339). Pure; seconds since 1970, UTC."""

from datetime import UTC, datetime


def micro_time(wall_s: float) -> str:
    """As a MicroTime: always six digits, which its parser insists on."""
    return datetime.fromtimestamp(wall_s, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def time(wall_s: float) -> str:
    """As a Time: whole seconds."""
    return datetime.fromtimestamp(wall_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def parse(text: str) -> float:
    """Raises ValueError for what is no time, or one without its zone."""
    try:
        found = datetime.fromisoformat(text.strip())
    except ValueError:
        raise ValueError(f"{text!r} is no time; write it like 2026-01-31T12:00:00Z") from None
    if found.tzinfo is None:
        raise ValueError(f"{text!r} has no time zone; end it with Z for UTC")
    return found.timestamp()
