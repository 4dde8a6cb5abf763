"""HPA sets what the autoscaler's policy wants, by way of the external-metrics API."""

from __future__ import annotations

from typing import Any

import pytest

from tests.cluster.autoscaling import DECODE, Autoscaler
from tests.cluster.cluster import Cluster
from tests.cluster.external_metrics import METRIC, Adapter
from tests.cluster.load import BURST, SELDOM_S, Load


@pytest.fixture(scope="module")
def adapter(mesh: Cluster) -> Adapter:
    """Asked by the API server; an HPA follows it. What the tests before left is scaled down first."""
    autoscaler = Autoscaler(mesh)
    autoscaler.begin()
    autoscaler.wait_until_small(DECODE)
    adapter = Adapter(mesh)
    adapter.begin()
    return adapter


def test_the_api_server_answers_with_what_is_wanted(adapter: Adapter) -> None:
    seen: list[list[Any]] = []

    def is_decided() -> bool:
        """By the replica that is asked this time; the other one may need longer."""
        seen.append(adapter.wanted("decode"))
        return bool(seen[-1])

    adapter.cluster.wait_for(is_decided, "a decision")
    (value,) = seen[-1]
    assert value["metricName"] == METRIC and int(value["value"]) >= 1
    assert value["metricLabels"] == {"pool": "decode", "model": "smollm2"}


def test_hpa_scales_with_a_burst_and_without_a_failed_request(adapter: Adapter, api_key: str) -> None:
    cluster = adapter.cluster
    cluster.wait_for(lambda: len(cluster.pods(DECODE)) == 1, "one decode worker", timeout_s=150)
    (first,) = cluster.ready_pods(DECODE)
    with Load(api_key, clients=1, pause_s=SELDOM_S) as light:
        with Load(api_key, clients=BURST, patient=False) as burst:
            cluster.wait_for(lambda: cluster.replicas(DECODE) > 1, "more replicas", timeout_s=90)
            cluster.wait_for(lambda: {o.decode_worker for o in burst.outcomes} - {first, ""}, "a new pod to serve", timeout_s=120)
            burst.wait_until_answered(10)
        cluster.wait_for(lambda: cluster.replicas(DECODE) == 1, "fewer replicas", timeout_s=150)
        cluster.wait_for(lambda: len(cluster.pods(DECODE)) == 1, "the others to drain and go", timeout_s=120)
        light.wait_for_answers(2)
        light.wait_until_answered(5)
    burst.assert_none_failed(at_least=10)
    light.assert_none_failed(at_least=5)
