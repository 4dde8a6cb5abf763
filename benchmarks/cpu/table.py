"""What a person reads at the end of `make bench-cpu`: everybody side by side, then each figure with its goal and limit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from benchmarks.accuracy import missed
from benchmarks.cpu.cases import Plan, decode_case, prefill_case
from benchmarks.harness import Figure


def side_by_side(names: Sequence[str], medians: Mapping[str, float], plan: Plan) -> str:
    """Tokens a second, a line per contestant."""
    sizes = {f"batch {batch}": [decode_case(name, batch) for name in names] for batch in plan.batches}
    sizes[f"prefill {plan.prefill_tokens}"] = [prefill_case(name, plan.prefill_tokens) for name in names]
    columns = [[label, *(f"{medians[case]:.0f}" if case in medians else "-" for case in cases)] for label, cases in sizes.items()]
    return _aligned(list(zip(["tokens/s", *names], *columns, strict=True)))


def all_with_goals(figures: Sequence[Figure]) -> str:
    """A line per figure."""
    return _aligned([("", "value", "unit", "goal", "", "limit", "of limit", "against"), *map(_cells, figures)])


def left_out(reasons: Mapping[str, str]) -> Iterator[str]:
    for name, reason in reasons.items():
        yield f"{name}: NOT MEASURED: {reason}"


def _cells(figure: Figure) -> tuple[str, ...]:
    met = "" if figure.goal is None else "MISSED" if missed(figure) else "met"
    # A limit of 1 is a share already, one of 0 is the ideal of a difference.
    is_rate = figure.limit is not None and figure.limit > 1 and isinstance(figure.value, int | float)
    share = f"{float(figure.value) / figure.limit:.2f}" if is_rate and figure.limit else ""
    return (
        figure.name,
        figure.value if isinstance(figure.value, str) else f"{figure.value:.4g}",
        figure.unit,
        "" if figure.goal is None else f"{'>=' if figure.better == 'higher' else '<='} {figure.goal}",
        met,
        "" if figure.limit is None else f"{figure.limit:.4g}",
        share,
        figure.peer or "",
    )


def _aligned(lines: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines)
