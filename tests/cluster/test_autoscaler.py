"""The autoscaler scales real Deployments, and nobody notices; it gives way to people, outages and failures."""

from __future__ import annotations

import re
import signal
import time

import pytest

from tests.cluster.autoscaling import COOL_DOWN_S, DECODE, HOLD_UNTIL, MAX_DECODE, NAME, Autoscaler, secret_of
from tests.cluster.cluster import NAMESPACE
from tests.cluster.load import BURST, SELDOM_S, Load

FAILED_STARTS = re.compile("not started within|for nothing")
"""What it says of pods that were asked for and do not come."""
NO_SECRET = "secret 'pdmesh-redis' not found"
OUTAGE_S = 10
"""Longer than a leader goes on leading without an answer."""


@pytest.fixture(autouse=True)
def quiet(autoscaler: Autoscaler) -> None:
    """Each test begins with one decode worker, as nobody asks for anything."""
    autoscaler.wait_until_small(DECODE)


def test_a_burst_scales_up_and_its_end_scales_down_without_a_failed_request(autoscaler: Autoscaler, api_key: str) -> None:
    cluster = autoscaler.cluster
    (first,) = cluster.ready_pods(DECODE)
    with Load(api_key, clients=1, pause_s=SELDOM_S) as light:
        with Load(api_key, clients=BURST, patient=False) as burst:
            cluster.wait_for(lambda: cluster.replicas(DECODE) > 1, "more replicas")
            cluster.wait_for(lambda: len(cluster.ready_pods(DECODE)) > 1, "a new pod to be ready", timeout_s=120)
            cluster.wait_for(lambda: {o.decode_worker for o in burst.outcomes} - {first, ""}, "a new pod to serve")
            burst.wait_until_answered(10)
        cluster.wait_for(lambda: cluster.replicas(DECODE) == 1, "fewer replicas", timeout_s=120)
        cluster.wait_for(lambda: len(cluster.pods(DECODE)) == 1, "the others to drain and go", timeout_s=120)
        light.wait_for_answers(2)
        light.wait_until_answered(5)
    burst.assert_none_failed(at_least=10)
    light.assert_none_failed(at_least=5)
    assert {"ScaledUp", "ScaledDown"} <= autoscaler.scaled_for_load(DECODE), autoscaler.events(DECODE)


def test_the_next_leader_goes_on_where_the_killed_one_was(autoscaler: Autoscaler, api_key: str) -> None:
    cluster = autoscaler.cluster
    by_people = autoscaler.num_events(DECODE, "ManualChange")
    with Load(api_key, clients=1, pause_s=SELDOM_S) as load:
        with Load(api_key, clients=BURST, patient=False) as burst:
            cluster.wait_for(lambda: cluster.replicas(DECODE) > 1, "more replicas", timeout_s=120)
            leader = autoscaler.leader()
            assert leader is not None
            cluster.signal(leader, "autoscaler", signal.SIGKILL)
            cluster.wait_for(lambda: autoscaler.leader() not in (leader, None), "another leader")
            cluster.wait_for(lambda: len(cluster.ready_pods(NAME)) == 2, "the killed one to be back")
            burst.wait_until_answered(1)
        # It knows that nobody else has set these replicas; else they would stay for half an hour.
        cluster.wait_for(lambda: cluster.replicas(DECODE) == 1, "fewer replicas", timeout_s=150)
        load.wait_until_answered(1)
    burst.assert_none_failed()
    load.assert_none_failed()
    assert autoscaler.num_events(DECODE, "ManualChange") == by_people


def test_what_a_person_sets_stays(autoscaler: Autoscaler, api_key: str) -> None:
    cluster = autoscaler.cluster
    with Load(api_key, clients=1, pause_s=SELDOM_S) as load:
        load.wait_for_answers(2)
        cluster.scale(DECODE, 2)
        cluster.wait_for(lambda: len(cluster.ready_pods(DECODE)) == 2, "the second worker")
        ends = time.monotonic() + 2 * COOL_DOWN_S
        while time.monotonic() < ends:
            assert cluster.replicas(DECODE) == 2
            time.sleep(0.5)
        assert "ManualChange" in [reason for reason, _ in autoscaler.events(DECODE)]
        # Until the person says that it need not stay any longer. Without that note the hold would begin anew, so the note stays.
        cluster.plane.kubectl("-n", NAMESPACE, "annotate", f"deployment/{DECODE}", f"{HOLD_UNTIL}={_now()}")
        cluster.wait_for(lambda: cluster.replicas(DECODE) == 1, "the autoscaler to take over", timeout_s=120)
        load.wait_until_answered(10)
    load.assert_none_failed(at_least=10)


@pytest.mark.parametrize("kind", ["stopped", "killed"])
def test_without_an_api_server_it_serves_on_and_scales_nothing(autoscaler: Autoscaler, api_key: str, kind: str) -> None:
    cluster, plane = autoscaler.cluster, autoscaler.cluster.plane
    with Load(api_key, clients=1, pause_s=SELDOM_S) as load:
        load.wait_for_answers(2)
        changes = autoscaler.num_changes()
        if kind == "stopped":
            plane.signal("kube-apiserver", signal.SIGSTOP)
        else:
            plane.end("kube-apiserver", signal.SIGKILL)
        ends = time.monotonic() + OUTAGE_S
        load.wait_for_answers(5)
        time.sleep(max(0.0, ends - time.monotonic()))
        assert autoscaler.num_changes() == changes
        if kind == "stopped":
            plane.signal("kube-apiserver", signal.SIGCONT)
        else:
            plane.start("kube-apiserver")
        plane.wait_ready()
        renewed = autoscaler.renewed()
        cluster.wait_for(lambda: autoscaler.renewed() > renewed and autoscaler.leader(), "a leader again")
        load.wait_for_answers(2)
    load.assert_none_failed(at_least=9)
    with Load(api_key, clients=BURST, patient=False) as burst:
        cluster.wait_for(lambda: autoscaler.num_changes() > changes, "it to act again", timeout_s=90)
        cluster.wait_for(lambda: cluster.replicas(DECODE) > 1, "more replicas")
        burst.wait_until_answered(1)
    burst.assert_none_failed()


def test_pods_that_do_not_start_are_said_and_not_asked_for_without_end(autoscaler: Autoscaler, api_key: str) -> None:
    cluster = autoscaler.cluster
    secret = secret_of(cluster, "pdmesh-redis")
    (first,) = cluster.ready_pods(DECODE)
    said = len(FAILED_STARTS.findall(autoscaler.logs()))
    cluster.plane.kubectl("-n", NAMESPACE, "delete", "secret", "pdmesh-redis")
    try:
        with Load(api_key, clients=BURST, patient=False) as load:
            cluster.wait_for(lambda: NO_SECRET in cluster.problems(DECODE), "a start that fails", timeout_s=90)
            cluster.wait_for(
                lambda: len(FAILED_STARTS.findall(autoscaler.logs())) > said, "the autoscaler to notice", timeout_s=120
            )
            ends = time.monotonic() + 2 * COOL_DOWN_S
            while time.monotonic() < ends:
                assert cluster.replicas(DECODE) <= MAX_DECODE and cluster.ready_pods(DECODE) == [first]
                time.sleep(0.5)
            cluster.apply([secret])
            cluster.wait_for(lambda: len(cluster.ready_pods(DECODE)) > 1, "them to start after all", timeout_s=120)
            load.wait_until_answered(10)
    finally:
        cluster.apply([secret])
    load.assert_none_failed(at_least=10)


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
