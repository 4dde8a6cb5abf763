"""Durations as people write objectives: 200ms, 0.2s. Pure."""

import re

_DURATION = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*(ms|s)")
_MILLISECONDS = {"ms": 1.0, "s": 1000.0}


def milliseconds(name: str, text: str) -> int:
    """Whole milliseconds, as objectives have them. Raises ValueError that begins with `name`."""
    match = _DURATION.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{name}: {text!r} is no duration; give one such as 200ms or 0.2s")
    value = float(match[1]) * _MILLISECONDS[match[2]]
    if not 1 <= value < 2**32 or value != round(value):
        raise ValueError(f"{name}: {text!r} is not a whole number of milliseconds, at least one")
    return round(value)
