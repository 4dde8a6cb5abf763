"""Draws charts as inline SVG: lines over a common axis; and builds sections and tables of a page. Pure.

Colours come from the page's style, so that it decides light and dark; every mark has a tooltip.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

# About as wide as a chart is shown, on a phone and in a row of three, so that its text keeps its size.
WIDTH, HEIGHT = 380, 210
_LEFT, _RIGHT, _TOP, _BOTTOM = 48, 18, 22, 38
_CHARACTER = 6.5  # width of one in a label

Point = tuple[float, float]


@dataclass(frozen=True)
class Line:
    """Hold a named line through points; `colour` is the number of a colour of the page. `steps`: values that hold until the next;
    `area`: filled down to 0; `measured`: few points, which are drawn as dots."""

    name: str
    points: Sequence[Point | None]
    colour: int
    steps: bool = False
    area: bool = False
    measured: bool = False


@dataclass(frozen=True)
class Mark:
    """Hold a named bound, drawn across (of y) or upright (of x); its name is at the upper end of an upright one, or `low`."""

    name: str
    value: float
    across: bool = True
    low: bool = False


@dataclass(frozen=True)
class Axis:
    """Hold an axis from `low` to `high`; `log`: in powers of ten (both ends above 0). `whole`: of counts."""

    low: float
    high: float
    log: bool = False
    whole: bool = False

    def place(self, value: float) -> float:
        """Return 0 at `low`, 1 at `high`; values outside are clipped."""
        if self.log:
            value = max(value, self.low)
            share = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return min(max(share, 0.0), 1.0)

    def ticks(self) -> list[float]:
        """Return about five round numbers."""
        if self.log:
            return _log_ticks(self.low, self.high)
        return _linear_ticks(self.low, self.high, 1.0 if self.whole else 0.0)


def linear(values: Sequence[float], *, whole: bool = False) -> Axis:
    """Return an axis from 0 to a little above the highest value; to 1 where all are 0."""
    return Axis(0.0, 1.05 * max([*values, 0.0]) or 1.0, whole=whole)


def logarithmic(values: Sequence[float]) -> Axis:
    """Return an axis around the values that are above 0."""
    positive = [value for value in values if value > 0] or [1.0]
    low, high = min(positive), max(positive)
    return Axis(low / 1.1, max(high * 1.1, low * 1.5), log=True)


def lines_chart(
    lines: Sequence[Line], x: Axis, y: Axis, *, x_unit: str, y_unit: str, marks: Sequence[Mark] = (), shaded: Sequence[Point] = ()
) -> str:
    """Draw lines, with a legend if there are several. `shaded`: stretches of x, from and to."""
    parts = [_shade(x, *stretch) for stretch in shaded]
    parts += [_grid(x, y, x_unit, y_unit), *(_line(line, x, y, x_unit, y_unit) for line in lines)]
    parts += [_mark(mark, x, y) for mark in marks]
    names = "".join(f'<span><i class="swatch c{line.colour}"></i>{escape(line.name)}</span>' for line in lines)
    legend = f'<div class="legend">{names}</div>' if len(lines) > 1 else ""
    return f'{legend}<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">{"".join(parts)}</svg>'


def cdf_chart(values: Sequence[float], unit: str, bound: float | None) -> str:
    """Draw how many of the values are at most x, and where the bound is."""
    x = logarithmic([*values, *([] if bound is None else [bound])])
    marks = [] if bound is None else [Mark("objective", bound, across=False, low=share_within(values, bound) > 0.5)]
    points = [(value, 100 * share) for value, share in cdf(values)]
    return lines_chart([Line("requests", points, 0)], x, Axis(0.0, 100.0), x_unit=unit, y_unit="% of requests", marks=marks)


def share_within(values: Sequence[float], bound: float) -> float:
    """Return the share of the values (at least one) that are at most `bound`."""
    return sum(value <= bound for value in values) / len(values)


def cdf(values: Sequence[float], max_points: int = 400) -> list[Point]:
    """Return the share of values at most x, at up to `max_points` of them."""
    ordered = sorted(values)
    step = max(1, len(ordered) // max_points)
    points = [(ordered[index], (index + 1) / len(ordered)) for index in range(0, len(ordered), step)]
    return [*points, (ordered[-1], 1.0)] if ordered else []


def number_text(value: float) -> str:
    """Return three significant digits, without a power of ten."""
    if value == 0:
        return "0"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    text = f"{value:.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def _x(axis: Axis, value: float) -> float:
    return _LEFT + axis.place(value) * (WIDTH - _LEFT - _RIGHT)


def _y(axis: Axis, value: float) -> float:
    return HEIGHT - _BOTTOM - axis.place(value) * (HEIGHT - _TOP - _BOTTOM)


def _shade(x: Axis, start: float, end: float) -> str:
    left, right = _x(x, start), _x(x, end)
    return f'<rect class="shade" x="{left:.1f}" y="{_TOP}" width="{right - left:.1f}" height="{HEIGHT - _TOP - _BOTTOM}"/>'


def _grid(x: Axis, y: Axis, x_unit: str, y_unit: str) -> str:
    parts = []
    for tick in y.ticks():
        at = _y(y, tick)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(f'<text class="tick" x="{_LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{number_text(tick)}</text>')
    base = HEIGHT - _BOTTOM
    for tick in x.ticks():
        at = _x(x, tick)
        parts.append(f'<line class="axis" x1="{at:.1f}" x2="{at:.1f}" y1="{base}" y2="{base + 4}"/>')
        parts.append(f'<text class="tick" x="{at:.1f}" y="{base + 17}" text-anchor="middle">{number_text(tick)}</text>')
    parts.append(f'<line class="axis" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{base}" y2="{base}"/>')
    middle = (_LEFT + WIDTH - _RIGHT) / 2
    parts.append(f'<text class="unit" x="{middle:.1f}" y="{HEIGHT - 5}" text-anchor="middle">{escape(x_unit)}</text>')
    parts.append(f'<text class="unit" x="2" y="12">{escape(y_unit)}</text>')
    return "".join(parts)


def _line(line: Line, x: Axis, y: Axis, x_unit: str, y_unit: str) -> str:
    css = f"point c{line.colour}" if line.measured else "dot"
    dots = "".join(_dot(css, line.name, point, x, y, x_unit, y_unit) for point in line.points if point is not None)
    pieces = [_path(piece, x, y, steps=line.steps) for piece in _unbroken(line.points)]
    # A path of no length with round ends: an isolated point is visible, too.
    drawn = f'<path class="line s{line.colour}" d="{"".join(f"M{piece}h0" for piece in pieces)}"/>'
    if not line.area:
        return drawn + dots
    base = f"{_y(y, y.low):.1f}"
    areas = "".join(
        f"M{_x(x, points[0][0]):.1f} {base}L{piece}V{base}Z" for points, piece in zip(_unbroken(line.points), pieces, strict=True)
    )
    return f'<path class="area c{line.colour}" d="{areas}"/>{drawn}{dots}'


def _unbroken(points: Sequence[Point | None]) -> list[list[Point]]:
    """Return the stretches between the points that are missing."""
    stretches: list[list[Point]] = [[]]
    for point in points:
        if point is None:
            stretches.append([])
        else:
            stretches[-1].append(point)
    return [stretch for stretch in stretches if stretch]


def _path(points: Sequence[Point], x: Axis, y: Axis, *, steps: bool) -> str:
    first, *rest = ((_x(x, point[0]), _y(y, point[1])) for point in points)
    moves = (f"H{at_x:.1f}V{at_y:.1f}" if steps else f"L{at_x:.1f} {at_y:.1f}" for at_x, at_y in rest)
    return f"{first[0]:.1f} {first[1]:.1f}{''.join(moves)}"


def _dot(css: str, name: str, point: Point, x: Axis, y: Axis, x_unit: str, y_unit: str) -> str:
    """Draw a dot with a tooltip; a "dot" is invisible until the pointer is on it."""
    title = f"{escape(name)}: {number_text(point[1])} {escape(y_unit)} at {number_text(point[0])} {escape(x_unit)}"
    return f'<circle class="{css}" cx="{_x(x, point[0]):.1f}" cy="{_y(y, point[1]):.1f}" r="4"><title>{title}</title></circle>'


def _mark(mark: Mark, x: Axis, y: Axis) -> str:
    if mark.across:
        at = _y(y, mark.value)
        ends, anchor = f'x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{at:.1f}" y2="{at:.1f}"', "end"
        text = f'x="{WIDTH - _RIGHT}" y="{at - 5:.1f}"'
    else:
        at, width = _x(x, mark.value), _CHARACTER * len(mark.name)
        # A rising curve leaves space above on the left and below on the right.
        left = at + width > WIDTH - _RIGHT if mark.low else at - width > _LEFT
        ends, anchor = f'x1="{at:.1f}" x2="{at:.1f}" y1="{_TOP}" y2="{HEIGHT - _BOTTOM}"', "end" if left else "start"
        text = f'x="{at + (-5 if left else 5):.1f}" y="{HEIGHT - _BOTTOM - 8 if mark.low else _TOP + 12}"'
    return f'<line class="mark" {ends}/><text class="marked" {text} text-anchor="{anchor}">{escape(mark.name)}</text>'


def _round_step(rough: float) -> float:
    """Return the next of 1, 2 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(rough))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))


def _linear_ticks(low: float, high: float, least_step: float = 0.0) -> list[float]:
    step = max(_round_step((high - low) / 5), least_step)
    first = math.ceil(low / step - 1e-9)
    return [number * step for number in range(first, math.floor(high / step + 1e-9) + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    if high / low < 5:
        return _linear_ticks(low, high)
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    factors = (1, 2, 5) if high / low < 300 else (1,)
    return [tick for power in powers for factor in factors if low <= (tick := factor * 10.0**power) <= high]


# Pieces of the page that all of its sections are made of.


def section(title: str, content: str) -> str:
    """Return a heading and the content under it (markup)."""
    return f"<section><h2>{escape(title)}</h2>{content}</section>"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return text in rows, without a head if that is empty; it scrolls by itself where it is wider than the page."""
    top = f"<tr>{''.join(f'<th>{escape(name)}</th>' for name in head)}</tr>" if head else ""
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table>{top}{body}</table></div>'
