"""Plain-text building blocks for the terminal: tables, bars, units, colour. No dependency; no colour but on a terminal."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TextIO

MAX_WIDTH = 100
_ELLIPSIS = "…"
_GAP = "  "


@dataclass(frozen=True)
class Palette:
    """Colours by meaning; every method returns its text unchanged when colour is off."""

    enabled: bool

    def bold(self, text: str) -> str:
        return self._wrap(text, "1")

    def faint(self, text: str) -> str:
        return self._wrap(text, "2")

    def good(self, text: str) -> str:
        return self._wrap(text, "32")

    def warning(self, text: str) -> str:
        return self._wrap(text, "33")

    def bad(self, text: str) -> str:
        return self._wrap(text, "31")

    def _wrap(self, text: str, code: str) -> str:
        return f"\x1b[{code}m{text}\x1b[0m" if self.enabled and text else text


def palette(stream: TextIO, env: Mapping[str, str] = os.environ) -> Palette:
    """Colours for `stream`: off unless it is a terminal, and off with NO_COLOR (https://no-color.org) or TERM=dumb."""
    return Palette(stream.isatty() and not env.get("NO_COLOR") and env.get("TERM") != "dumb")


def table(headers: Sequence[str], rows: Sequence[Sequence[str]], max_width: int = MAX_WIDTH) -> list[str]:
    """Lines of a left-aligned table of at most `max_width` columns; the widest columns are cut with "…" to fit."""
    cells = [list(headers), *(list(row) for row in rows)]
    widths = _fitting(
        [max(len(row[i]) for row in cells) for i in range(len(headers))], max_width - len(_GAP) * (len(headers) - 1)
    )
    return [_line(row, widths) for row in cells]


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    return _GAP.join(_cut(cell, width).ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip()


def _fitting(widths: list[int], room: int) -> list[int]:
    """`widths` with the widest shortened until all fit in `room`; none below one character."""
    widths = list(widths)
    while sum(widths) > room and max(widths) > 1:
        widths[widths.index(max(widths))] -= 1
    return widths


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: max(0, width - 1)] + _ELLIPSIS


def bar(share: float, width: int) -> str:
    """A bar of `width` columns filled to `share` of 1, in eighths of a column; what is more than nothing shows."""
    eighths = round(min(max(share, 0.0), 1.0) * width * 8)
    if share > 0:
        eighths = max(1, eighths)
    full, rest = divmod(eighths, 8)
    return ("█" * full + (" ▏▎▍▌▋▊▉"[rest] if rest else "")).ljust(width)


def duration(ns: float) -> str:
    """Nanoseconds for people: "850 µs", "12.3 ms", "1.25 s"."""
    if ns < 1e6:
        return f"{ns / 1e3:.0f} µs"
    if ns < 1e9:
        return f"{ns / 1e6:.1f} ms"
    return f"{ns / 1e9:.2f} s"


def size(num_bytes: float) -> str:
    """Bytes for people, in decimal units: "512 B", "3.4 MB"."""
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 1000 or unit == "GB":
            return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1000
    raise AssertionError("unreachable")


def breakdown(parts: Mapping[str, int], total: int, width: int = 30) -> list[str]:
    """One line per part with its duration (nanoseconds), its share of `total` and a bar."""
    name_width = max(len(name) for name in parts)
    return [
        f"{name.ljust(name_width)}  {duration(ns):>9}  {_percent(ns, total):>6}  {bar(_share(ns, total), width)}".rstrip()
        for name, ns in parts.items()
    ]


def _share(part: int, total: int) -> float:
    return part / total if total else 0.0


def _percent(part: int, total: int) -> str:
    return f"{100 * _share(part, total):.1f} %"
