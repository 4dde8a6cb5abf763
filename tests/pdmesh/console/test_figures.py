"""Distributions, flows and rates of the window."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdmesh.console.figures import (
    FLOW_WINDOW_S,
    MAX_CLASSES,
    MAX_MODELS,
    OTHERS,
    Query,
    by_model,
    classes,
    flows,
    latest,
    quantile,
    rates,
    slowest,
)
from pdmesh.console.store import RequestSummary
from tests.pdmesh.console.made import Made
from tests.pdmesh.console.test_store import MADE, START_NS, store_of

END_S = START_NS / 1e9 + MADE.total / 1000


def summaries(*requests: Made) -> list[RequestSummary]:
    return list(store_of(*requests).requests())[::-1]


@given(st.lists(st.tuples(st.floats(0, 1e7), st.booleans()), max_size=60))
def test_every_duration_is_in_the_class_that_says_so(durations: list[tuple[float, bool]]) -> None:
    found = classes(durations)
    assert sum(each.count for each in found) == len(durations) and len(found) <= MAX_CLASSES
    assert sum(each.missed for each in found) == sum(is_missed for _, is_missed in durations)
    assert all(math.isclose(a.to_ms, b.from_ms) for a, b in itertools.pairwise(found))
    for value, _ in durations:
        (own,) = [each for each in found if each.from_ms * (1 - 1e-8) <= max(1e-3, value) < each.to_ms * (1 - 1e-8)]
        assert own.count


def test_edges_are_powers_of_ten_that_hold_what_lies_on_them() -> None:
    (only,) = classes([(100.0, False), (100.0, True)])
    assert only.from_ms == pytest.approx(100.0) and (only.count, only.missed) == (2, 1)
    assert only.to_ms == pytest.approx(10**2.1)
    assert classes([]) == []


def test_quantiles_are_values_that_were_seen() -> None:
    assert [quantile([1.0, 2.0, 3.0, 4.0], share) for share in (0.0, 0.5, 0.51, 1.0)] == [1.0, 2.0, 3.0, 4.0]
    assert quantile([], 0.5) is None


def test_each_model_has_its_own_distribution_and_attainment() -> None:
    slow = replace(MADE, prefill_queue=300.0)
    other, one = by_model(summaries(MADE, slow, replace(MADE, error="UNAVAILABLE"), replace(MADE, model="other", goals=(0, 0))))
    assert (one["name"], one["num_requests"], one["num_judged"], one["num_met"], one["num_errors"]) == (MADE.model, 3, 3, 1, 1)
    assert sum(each["missed"] for each in one["ttft_ms"]["classes"]) == 1 and one["ttft_ms"]["count"] == 3
    assert one["ttft_ms"]["p99"] == pytest.approx(slow.ttft)
    assert (other["name"], other["num_judged"]) == ("other", 0)


def test_the_requests_of_a_bar_are_those_that_it_counts() -> None:
    requests = summaries(*(replace(MADE, prefill_compute=float(value)) for value in (5, 9, 30, 80, 81, 300)))
    (model,) = by_model(requests)
    for each in model["ttft_ms"]["classes"]:
        query = Query(MADE.model, "ttft_ms", each["from_ms"], each["to_ms"])
        assert sum(query.takes(request) for request in requests) == each["count"]
    assert not any(Query("other", "ttft_ms", 0, math.inf).takes(request) for request in requests)


def test_flows_are_of_requests_that_ended_lately() -> None:
    requests = summaries(MADE, MADE, replace(MADE, decode="decode-1"))
    first, second = flows(latest(requests, END_S + FLOW_WINDOW_S / 2))
    assert (first["router"], first["prefill"], first["decode"]) == ("router-0", "prefill-0", "decode-0")
    assert first["per_s"] == 2 / FLOW_WINDOW_S and second["decode"] == "decode-1"
    assert first["kv_bytes_per_s"] == 2 * 46_080 * MADE.input_tokens / FLOW_WINDOW_S
    assert latest(requests, END_S + FLOW_WINDOW_S + 1) == []
    assert rates(latest(requests, END_S))["requests_per_s"] == 3 / FLOW_WINDOW_S and rates([])["requests_per_s"] == 0


def test_a_prompt_that_decode_computed_flows_past_prefill() -> None:
    (request,) = summaries(MADE)
    (flow,) = flows([replace(request, mode="local")])
    assert (flow["prefill"], flow["decode"]) == ("", "decode-0")


def test_the_slowest_come_first_and_those_without_a_token_never() -> None:
    requests = summaries(*(replace(MADE, prefill_queue=float(wait)) for wait in (1, 9, 5)))
    unanswered = replace(requests[0], ttft_ms=None)
    assert [request.parts["prefill_queue"] for request in slowest([*requests, unanswered], 2)] == [9.0, 5.0]


def test_more_models_than_a_page_can_show_are_told_together() -> None:
    made = [replace(MADE, model=f"model-{number}") for number in range(70)]
    models = by_model(summaries(*made, replace(MADE, model="model-69", request_id="again")))
    assert len(models) == MAX_MODELS + 1 and sum(model["num_requests"] for model in models) == 71
    assert {model["name"] for model in models} >= {OTHERS, "model-69"}
