"""Output of the commands, drawn by rich: tables, bars, colours by meaning; and the units of their figures."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import TextIO

from rich.bar import Bar
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text
from rich.theme import Theme

MAX_WIDTH = 100
_THEME = Theme({"good": "green", "warning": "yellow", "bad": "red", "faint": "dim", "bar.complete": "green"})
_BAR_WIDTH = 30


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Leave it to the program, which has an exit code for it."""
        raise BrokenPipeError


def console(stream: TextIO, width: int = MAX_WIDTH) -> Console:
    """Return a console for `stream` that is `width` columns wide, or as wide as a narrower terminal; only tables are cut to fit.

    It colours nothing unless `stream` is a terminal, nor with NO_COLOR (https://no-color.org) or TERM=dumb; text is no markup."""
    made = _Console(
        file=stream,
        force_terminal=stream.isatty(),
        color_system=None if os.environ.get("NO_COLOR") else "auto",
        theme=_THEME,
        markup=False,
        emoji=False,
        highlight=False,
        soft_wrap=True,
    )
    made.width = min(width, made.width) if made.is_terminal else width
    return made


def show(*parts: RenderableType, stream: TextIO | None = None, width: int = MAX_WIDTH) -> None:
    """Write `parts` to `stream` (None: standard output), each on lines of its own."""
    shown = console(stream or sys.stdout, width)
    for part in parts:
        shown.print(part)


def table(headers: Sequence[str], rows: Sequence[Sequence[str]], styles: Sequence[str] = ()) -> Table:
    """Return a left-aligned table of a line for each row, in `styles`; the widest columns are cut with "…" to fit."""
    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for header in headers:
        made.add_column(_cell(header))
    for row, style in zip_longest(rows, styles, fillvalue=""):
        made.add_row(*map(_cell, row), style=style)
    return made


def _cell(text: str) -> Text:
    # Here and not for the column: rich shrinks the widest of the columns that may wrap, but every one of those that may not.
    return Text(text, no_wrap=True, overflow="ellipsis")


def breakdown(parts: Mapping[str, int], total: int, limits: Mapping[str, int] | None = None) -> Table:
    """Return a line for each part: its duration (nanoseconds), its share of `total`, its limit where it is among `limits`
    (nanoseconds, and their share of the duration), and a bar."""
    made = Table.grid(padding=(0, 2, 0, 0))
    for justify in ("left", "right", "right", *(() if limits is None else ("left",)), "left"):
        made.add_column(justify=justify)
    for name, ns in parts.items():
        share = 100 * ns / total if total else 0.0
        limit = () if limits is None else (_limit(ns, limits.get(name)),)
        made.add_row(name, duration(ns), f"{share:.1f} %", *limit, Bar(total, 0, ns, width=_BAR_WIDTH))
    return made


def _limit(ns: int, limit: int | None) -> str:
    return "" if limit is None or not ns else f"limit {duration(limit)}, {100 * limit / ns:.0f} %"


def duration(ns: float) -> str:
    """Return nanoseconds for people: "850 µs", "12.3 ms", "1.25 s"."""
    if ns < 1e6:
        return f"{ns / 1e3:.0f} µs"
    if ns < 1e9:
        return f"{ns / 1e6:.1f} ms"
    return f"{ns / 1e9:.2f} s"


def size(num_bytes: float) -> str:
    """Return bytes for people, in decimal units: "512 B", "3.4 MB"."""
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 1000 or unit == "GB":
            return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1000
    raise AssertionError("unreachable")
