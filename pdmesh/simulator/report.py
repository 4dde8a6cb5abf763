"""What a simulation found, as numbers for programs and as a page for people. Pure."""

from collections.abc import Mapping

from pdmesh.simulator.histogram import RELATIVE_ERROR, Histogram
from pdmesh.simulator.results import Results

QUANTILES = (0.5, 0.9, 0.99)
MAX_LINES = 24
"""Of windows in the text."""


def numbers(results: Results, pod_seconds: Mapping[str, float], *, wall_s: float) -> dict[str, object]:
    """One object; `wall_s`: real seconds that it took."""
    total = results.total
    return {
        "num_requests": total.num_arrived,
        "num_completed": total.num_completed,
        "num_refused": total.num_refused,
        "num_lost": total.num_lost,
        "reasons": dict(sorted(results.reasons.items())),
        "num_local": results.num_local,
        "num_resubmissions": results.num_resubmissions,
        "num_input_tokens": results.num_input_tokens,
        "num_output_tokens": results.num_output_tokens,
        "simulated_s": results.ended_at,
        "attainment": total.attainment,
        "goodput_per_s": results.goodput,
        "ttft_s": _times(results.ttft),
        "tpot_s": _times(results.tpot),
        "quantile_error": RELATIVE_ERROR,
        "pod_seconds": dict(pod_seconds),
        "window_s": results.window_s,
        "windows": [
            {"num_arrived": w.num_arrived, "num_completed": w.num_completed, "num_met": w.num_met, "num_refused": w.num_refused}
            for w in results.windows
        ],
        "wall_s": wall_s,
        "requests_per_wall_s": total.num_arrived / wall_s if wall_s else 0.0,
    }


def text(results: Results, pod_seconds: Mapping[str, float], *, wall_s: float) -> str:
    """A short page."""
    total = results.total
    speed = total.num_arrived / wall_s if wall_s else 0.0
    refused = ", ".join(f"{reason} {count}" for reason, count in results.reasons.most_common())
    lines = [
        f"{total.num_arrived} requests in {results.ended_at:.0f} s (simulated in {wall_s:.1f} s, {speed:.0f} requests/s)",
        f"completed  {total.num_completed}, of which {_share(results.num_local, total.num_completed)} LOCAL",
        f"refused    {total.num_refused}   lost {total.num_lost}" + (f"   ({refused})" if refused else ""),
        f"objectives {total.attainment:.2%} met, goodput {results.goodput:.2f} requests/s",
        f"TTFT       {_line(results.ttft)}",
        f"TPOT       {_line(results.tpot)}",
        f"tokens     {results.num_input_tokens} in, {results.num_output_tokens} out",
        "pods       " + ", ".join(f"{pool} {seconds:.0f} s" for pool, seconds in pod_seconds.items() if seconds),
    ]
    return "\n".join(lines + _windows(results))


def _windows(results: Results) -> list[str]:
    """As many as fit on a page: several as one."""
    windows = results.windows
    each = -(-len(windows) // MAX_LINES) if windows else 1
    lines = ["", "from       arrived  completed  refused  met"]
    for start in range(0, len(windows), each):
        some = windows[start : start + each]
        arrived, completed = sum(w.num_arrived for w in some), sum(w.num_completed for w in some)
        refused = sum(w.num_refused for w in some)
        met = _share(sum(w.num_met for w in some), arrived)
        lines.append(f"{start * results.window_s:7.0f} s  {arrived:7d}  {completed:9d}  {refused:7d}  {met}")
    return lines


def _times(histogram: Histogram) -> dict[str, float]:
    quantiles = {f"p{round(100 * q)}": histogram.quantile(q) for q in QUANTILES}
    return {"mean": histogram.mean_s, **quantiles, "max": histogram.max_s}


def _line(histogram: Histogram) -> str:
    """Milliseconds."""
    return ", ".join(f"{name} {1e3 * seconds:.1f}" for name, seconds in _times(histogram).items()) + " ms"


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else "-"
