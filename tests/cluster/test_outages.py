"""What the autoscaler does not see, it does not act on: Redis that hangs, a router that hangs. No request fails of it."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable

import pytest

from tests.cluster.autoscaling import COOL_DOWN_S, DECODE, Autoscaler
from tests.cluster.cluster import Cluster
from tests.cluster.load import BURST, SELDOM_S, Load

REDIS, ROUTER = "pdmesh-redis", "pdmesh-router"
PATIENCE_S = 60.0
"""Of clients whose router hangs."""


@pytest.fixture(autouse=True)
def quiet(autoscaler: Autoscaler) -> None:
    """Each test begins with one decode worker, as nobody asks for anything."""
    autoscaler.wait_until_small(DECODE)


def test_without_redis_replicas_stay_however_few_would_do(autoscaler: Autoscaler, api_key: str) -> None:
    """It hangs from the middle of a burst until its liveness probe has it started again, empty."""
    cluster = autoscaler.cluster
    (redis,) = cluster.ready_pods(REDIS)
    with Load(api_key, clients=1, pause_s=SELDOM_S) as light:
        with Load(api_key, clients=BURST, patient=False) as burst:
            cluster.wait_for(lambda: len(cluster.ready_pods(DECODE)) > 1, "a new pod to be ready", timeout_s=150)
            holds = autoscaler.num_holds("an outage of the registry")
            restarts = cluster.num_restarts(REDIS)
            cluster.signal(redis, "redis", signal.SIGSTOP)
            cluster.wait_for(lambda: autoscaler.num_holds("an outage of the registry") > holds, "the autoscaler to notice")
            replicas = cluster.replicas(DECODE)
            assert replicas > 1
            burst.wait_for_answers(4)
            burst.wait_until_answered(10)
        _assert_stays(cluster, replicas, lambda: cluster.num_restarts(REDIS) > restarts)
        light.wait_for_answers(2)
        cluster.wait_for(lambda: cluster.replicas(DECODE) == 1, "fewer replicas", timeout_s=150)
        light.wait_until_answered(5)
    burst.assert_none_failed(at_least=10)
    light.assert_none_failed(at_least=5)


def test_while_a_router_is_silent_replicas_stay(autoscaler: Autoscaler, api_key: str) -> None:
    """It hangs for longer than its figures are believed and a cool-down lasts, and nobody else routes; then it goes on."""
    cluster = autoscaler.cluster
    (router,) = cluster.ready_pods(ROUTER)
    with Load(api_key, clients=1, pause_s=SELDOM_S, resume_s=PATIENCE_S) as light:
        with Load(api_key, clients=BURST, patient=False) as burst:
            cluster.wait_for(lambda: len(cluster.ready_pods(DECODE)) > 1, "a new pod to be ready", timeout_s=150)
        holds = autoscaler.num_holds("nothing changes")
        cluster.signal(router, "router", signal.SIGSTOP)
        try:
            cluster.wait_for(lambda: autoscaler.num_holds("nothing changes") > holds, "the autoscaler to notice")
            replicas = cluster.replicas(DECODE)  # not earlier: its last figures are believed for a while
            assert replicas > 1
            ends = time.monotonic() + 2 * COOL_DOWN_S
            _assert_stays(cluster, replicas, lambda: time.monotonic() > ends)
        finally:
            cluster.signal(router, "router", signal.SIGCONT)
        light.wait_for_answers(2)
        cluster.wait_for(lambda: cluster.replicas(DECODE) == 1, "fewer replicas", timeout_s=150)
        light.wait_until_answered(5)
    burst.assert_none_failed(at_least=10)
    light.assert_none_failed(at_least=5)


def _assert_stays(cluster: Cluster, replicas: int, is_over: Callable[[], bool]) -> None:
    """Until it is over; what is seen when it is does not count, as it may have been over before."""
    while True:
        seen = cluster.replicas(DECODE)
        if is_over():
            return
        assert seen == replicas, cluster.report()
        time.sleep(0.5)
