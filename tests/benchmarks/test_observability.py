"""What of the observability benchmark needs no mesh: comparing turns, drawing a turn's work, judging traces."""

from __future__ import annotations

import pytest

from benchmarks.harness import reached
from benchmarks.observability.overhead import jobs, ratios
from tests.support import trace_figures
from tests.support.otlp_receiver import Received
from tests.support.trace_figures import DELAYS, figures_of
from tests.support.traces import Trace, trace_so_far


def test_a_turn_is_compared_with_those_of_the_base_on_either_side() -> None:
    taken = [("off", 10.0), ("on", 9.0), ("off", 8.0), ("on", 12.0), ("off", 16.0)]
    assert ratios(taken, "off") == {"on": [1.0, 1.0], "off": [8 / 13]}
    assert ratios(taken[1:4], "off") == {}, "nothing before, or nothing behind"


def test_turns_do_the_same_work_on_other_tokens() -> None:
    one, other = jobs(1, 20), jobs(2, 20)
    assert [(len(job.prompt), job.num_tokens) for job in one] == [(len(job.prompt), job.num_tokens) for job in other]
    assert not {job.prompt[:16] for job in one} & {job.prompt[:16] for job in other}
    assert one == jobs(1, 20)


def _span(name: str, process: str, parent: str, ms: float, **attributes: object) -> Received:
    end_ns = round(ms * 1e6)
    return Received(
        name, "t", f"{process}/{name}", parent, 1, 0, end_ns, attributes, (), (), False, "", {"service.instance.id": process}  # type: ignore[arg-type]
    )  # fmt: skip


def _trace(mode: str, ttft_ms: float) -> Trace:
    root = _span(
        "generate m", "router-0", "", 99, **{"gen_ai.response.id": "r", "pdmesh.mode": mode, "pdmesh.ttft_ms": ttft_ms}
    )  # fmt: skip
    attempt = _span("attempt", "router-0", root.span_id, 90, **{"pdmesh.mode": mode})
    reserve = _span("reserve", "router-0", attempt.span_id, 5)
    inside = [_span("submit", "decode-0", reserve.span_id, 2), _span("prefill.compute", "decode-0", attempt.span_id, 30)]
    return Trace(root, [root, attempt, reserve, *inside])


@pytest.mark.parametrize(("mode", "whole_ms"), [("remote", 35.0), ("local", 32.0)])
def test_of_a_local_submit_counts_until_the_engine_has_the_prompt(mode: str, whole_ms: float) -> None:
    assert _trace(mode, whole_ms).missing_ms == pytest.approx(0)


def test_a_trace_that_does_not_add_up_is_counted_and_named() -> None:
    share, worst, _ = trace_figures.parts_figures([_trace("remote", 35.0), _trace("remote", 35.9), _trace("remote", 45.0)])
    assert (share.value, reached(share), worst.value) == (round(2 / 3, 4), False, 10.0)


def test_a_span_whose_parent_is_not_there_has_not_arrived() -> None:
    trace = _trace("local", 32.0)
    wanted = {trace.path(span) for span in trace.spans}
    assert None not in wanted and "generate@router/attempt@router/reserve@router/submit@decode" in wanted
    orphaned = trace_so_far([span for span in trace.spans if span.name != "reserve"], "r")
    assert orphaned is not None
    lacking = trace_figures.lacks(orphaned, orphaned.spans, {path for path in wanted if path})
    assert {path.rpartition("/")[2] for path in lacking} == {"reserve@router", "submit@decode"}


def test_a_decode_span_that_no_step_links_to_lacks_that() -> None:
    trace = _trace("local", 32.0)
    decode = _span("decode", "decode-0", trace.spans[1].span_id, 50)
    assert trace_figures.lacks(Trace(trace.root, [*trace.spans, decode]), [decode], set()) == {trace_figures.STEP}


def test_a_delay_that_moves_another_part_is_missed() -> None:
    (delay,) = (each for each in DELAYS if each.part == "reserve")
    own, other = figures_of(delay, {"reserve": 51.0, "route": 0.1, "prefill.queue": -30.0})
    assert reached(own) and not reached(other) and (other.value, other.peer) == (30.0, "prefill.queue")
