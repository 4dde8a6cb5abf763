"""Charts as inline SVG: lines over a common axis, horizontal stacked bars. Pure.

Colours come from the page's style, so that light and dark are its business; every mark has a text for the pointer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 640, 220
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 12, 10, 28

Point = tuple[float, float]


@dataclass(frozen=True)
class Line:
    """A named line through points; `colour` is the number of a colour of the page. `steps`: values that hold until the next."""

    name: str
    points: Sequence[Point | None]
    colour: int
    steps: bool = False


@dataclass(frozen=True)
class Axis:
    """From `low` to `high`; `log`: in powers of ten (both ends above 0)."""

    low: float
    high: float
    log: bool = False

    def place(self, value: float) -> float:
        """0 at `low`, 1 at `high`; what lies outside is put at the end."""
        if self.log:
            value = max(value, self.low)
            share = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return min(max(share, 0.0), 1.0)

    def ticks(self) -> list[float]:
        """About five round numbers."""
        if self.log:
            return _log_ticks(self.low, self.high)
        return _linear_ticks(self.low, self.high)


def linear(values: Sequence[float]) -> Axis:
    """From 0 to a little above the highest value; to 1 where all are 0."""
    return Axis(0.0, 1.05 * max([*values, 0.0]) or 1.0)


def logarithmic(values: Sequence[float]) -> Axis:
    """Around the values that are above 0."""
    positive = [value for value in values if value > 0] or [1.0]
    low, high = min(positive), max(positive)
    return Axis(low / 1.1, max(high * 1.1, low * 1.5), log=True)


def lines_chart(
    lines: Sequence[Line],
    x: Axis,
    y: Axis,
    *,
    x_unit: str,
    y_unit: str,
    marks: Mapping[str, float] | None = None,
    across: bool = True,
) -> str:
    """Lines with a legend. `marks`: named bounds, drawn across (of y) or, with `across` False, upright (of x)."""
    parts = [_grid(x, y, x_unit, y_unit)]
    parts += [_line(line, x, y, x_unit, y_unit) for line in lines]
    parts += [_mark(name, value, x, y, across=across) for name, value in (marks or {}).items()]
    legend = "".join(f'<span><i class="swatch c{line.colour}"></i>{escape(line.name)}</span>' for line in lines)
    return f'<div class="legend">{legend}</div>{_svg("".join(parts), HEIGHT)}'


def stacked_bars(rows: Mapping[str, Mapping[str, float]], unit: str) -> str:
    """A bar for each row, of parts that stand in one order and have one colour each."""
    names = list(dict.fromkeys(name for parts in rows.values() for name in parts))
    widest = max((math.fsum(parts.values()) for parts in rows.values()), default=0.0) or 1.0
    bars, left = [], 110
    scale = (WIDTH - left - 70) / widest
    for number, (row, parts) in enumerate(rows.items()):
        at, y = float(left), 8 + number * 34
        bars.append(f'<text class="label" x="{left - 8}" y="{y + 15}" text-anchor="end">{escape(row)}</text>')
        for name in names:
            width = parts.get(name, 0.0) * scale
            if width > 0:
                title = f"<title>{escape(name)}: {number_text(parts[name])} {unit}</title>"
                bars.append(
                    f'<rect class="c{names.index(name)}" x="{at:.1f}" y="{y}" width="{width:.2f}" height="22">{title}</rect>'
                )
                at += width
        total = math.fsum(parts.values())
        bars.append(f'<text class="label" x="{at + 6:.1f}" y="{y + 15}">{number_text(total)} {unit}</text>')
    legend = "".join(f'<span><i class="swatch c{number}"></i>{escape(name)}</span>' for number, name in enumerate(names))
    return f'<div class="legend">{legend}</div>{_svg("".join(bars), 16 + 34 * len(rows))}'


def cdf(values: Sequence[float], max_points: int = 400) -> list[Point]:
    """The share of values at most x, at up to `max_points` of them."""
    ordered = sorted(values)
    step = max(1, len(ordered) // max_points)
    points = [(ordered[index], (index + 1) / len(ordered)) for index in range(0, len(ordered), step)]
    return [*points, (ordered[-1], 1.0)] if ordered else []


def number_text(value: float) -> str:
    """Three digits that matter, without a power of ten."""
    if value == 0:
        return "0"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    text = f"{value:.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def _svg(content: str, height: int) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {height}" role="img">{content}</svg>'


def _x(axis: Axis, value: float) -> float:
    return _LEFT + axis.place(value) * (WIDTH - _LEFT - _RIGHT)


def _y(axis: Axis, value: float) -> float:
    return HEIGHT - _BOTTOM - axis.place(value) * (HEIGHT - _TOP - _BOTTOM)


def _grid(x: Axis, y: Axis, x_unit: str, y_unit: str) -> str:
    parts = []
    for tick in y.ticks():
        at = _y(y, tick)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(f'<text class="tick" x="{_LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{number_text(tick)}</text>')
    for tick in x.ticks():
        at = _x(x, tick)
        parts.append(f'<text class="tick" x="{at:.1f}" y="{HEIGHT - 12}" text-anchor="middle">{number_text(tick)}</text>')
    parts.append(f'<line class="axis" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{HEIGHT - _BOTTOM}" y2="{HEIGHT - _BOTTOM}"/>')
    parts.append(f'<text class="unit" x="{WIDTH - _RIGHT}" y="{HEIGHT - 1}" text-anchor="end">{escape(x_unit)}</text>')
    parts.append(f'<text class="unit" x="{_LEFT + 4}" y="{_TOP + 4}">{escape(y_unit)}</text>')
    return "".join(parts)


def _line(line: Line, x: Axis, y: Axis, x_unit: str, y_unit: str) -> str:
    paths: list[str] = []
    last: Point | None = None
    for point in line.points:
        if point is not None:
            at_x, at_y = _x(x, point[0]), _y(y, point[1])
            if last is None:
                paths.append(f"M{at_x:.1f} {at_y:.1f}")
            else:
                paths.append(f"H{at_x:.1f}V{at_y:.1f}" if line.steps else f"L{at_x:.1f} {at_y:.1f}")
        last = point
    dots = "".join(_dot(line.name, point, x, y, x_unit, y_unit) for point in line.points if point is not None)
    return f'<path class="line s{line.colour}" d="{"".join(paths)}"/>{dots}'


def _dot(name: str, point: Point, x: Axis, y: Axis, x_unit: str, y_unit: str) -> str:
    """Not seen until the pointer is on it."""
    title = f"{escape(name)}: {number_text(point[1])} {escape(y_unit)} at {number_text(point[0])} {escape(x_unit)}"
    return f'<circle class="dot" cx="{_x(x, point[0]):.1f}" cy="{_y(y, point[1]):.1f}" r="4"><title>{title}</title></circle>'


def _mark(name: str, value: float, x: Axis, y: Axis, *, across: bool) -> str:
    if across:
        at = _y(y, value)
        ends, text = f'x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{at:.1f}" y2="{at:.1f}"', f'x="{WIDTH - _RIGHT}" y="{at - 4:.1f}"'
    else:
        at = _x(x, value)
        ends, text = f'x1="{at:.1f}" x2="{at:.1f}" y1="{_TOP}" y2="{HEIGHT - _BOTTOM}"', f'x="{at - 4:.1f}" y="{_TOP + 16}"'
    return f'<line class="mark" {ends}/><text class="marked" {text} text-anchor="end">{escape(name)}</text>'


def _round_step(rough: float) -> float:
    """The next of 1, 2 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(rough))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))


def _linear_ticks(low: float, high: float) -> list[float]:
    step = _round_step((high - low) / 5)
    first = math.ceil(low / step - 1e-9)
    return [number * step for number in range(first, math.floor(high / step + 1e-9) + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    if high / low < 5:
        return _linear_ticks(low, high)
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    factors = (1, 2, 5) if high / low < 300 else (1,)
    return [tick for power in powers for factor in factors if low <= (tick := factor * 10.0**power) <= high]
