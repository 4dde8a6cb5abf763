"""The autoscaler scales real Deployments, and nobody notices; it gives way to people, outages and failures."""

from __future__ import annotations

import re
import signal
import time

import pytest

from tests.cluster.autoscaling import COOL_DOWN_S, DECODE, HOLD_UNTIL, MAX_DECODE, NAME, Autoscaler, secret_of
from tests.cluster.cluster import NAMESPACE
from tests.cluster.load import BURST, Load

FAILED_STARTS = re.compile("count for nothing|have not started")
"""What it says of pods that were asked for and do not come."""
OUTAGE_S = 10
"""Longer than a leader goes on leading without an answer."""


@pytest.fixture(autouse=True)
def quiet(autoscaler: Autoscaler) -> None:
    """Each test begins with one decode worker, as nobody asks for anything."""
    autoscaler.wait_until_small(DECODE)


def test_a_burst_scales_up_and_its_end_scales_down_without_a_failed_request(autoscaler: Autoscaler, api_key: str) -> None:
    cluster = autoscaler.cluster
    (first,) = cluster.ready_pods(DECODE)
    with Load(api_key, clients=1, pause_s=1.0) as light:
        with Load(api_key, clients=BURST, patient=False) as burst:
            cluster.wait_for(lambda: cluster.replicas(DECODE) > 1, "more replicas")
            cluster.wait_for(lambda: len(cluster.ready_pods(DECODE)) > 1, "a new pod to be ready", timeout_s=120)
            cluster.wait_for(lambda: {o.decode_worker for o in burst.outcomes} - {first, ""}, "a new pod to serve")
        cluster.wait_for(lambda: cluster.replicas(DECODE) == 1, "fewer replicas", timeout_s=120)
        cluster.wait_for(lambda: len(cluster.pods(DECODE)) == 1, "the others to drain and go", timeout_s=120)
        light.wait_for_answers(2)
    burst.assert_none_failed(at_least=10)
    light.assert_none_failed(at_least=5)
    reasons = [reason for reason, note in autoscaler.events(DECODE) if "requests/s" in note or "enough" in note]
    assert {"ScaledUp", "ScaledDown"} <= set(reasons), autoscaler.events(DECODE)


def test_the_next_leader_goes_on_where_the_killed_one_was(autoscaler: Autoscaler, api_key: str) -> None:
    cluster = autoscaler.cluster
    by_people = autoscaler.num_events(DECODE, "ManualChange")
    with Load(api_key, clients=1, pause_s=0.5) as load:
        with Load(api_key, clients=BURST, patient=False) as burst:
            cluster.wait_for(lambda: cluster.replicas(DECODE) > 1, "more replicas", timeout_s=120)
            leader = autoscaler.leader()
            assert leader is not None
            cluster.signal(leader, "autoscaler", signal.SIGKILL)
            cluster.wait_for(lambda: autoscaler.leader() not in (leader, None), "another leader")
            cluster.wait_for(lambda: len(cluster.ready_pods(NAME)) == 2, "the killed one to be back")
        # It knows that nobody else has set these replicas; else they would stay for half an hour.
        cluster.wait_for(lambda: cluster.replicas(DECODE) == 1, "fewer replicas", timeout_s=150)
    burst.assert_none_failed()
    load.assert_none_failed()
    assert autoscaler.num_events(DECODE, "ManualChange") == by_people


def test_what_a_person_sets_stays(autoscaler: Autoscaler, api_key: str) -> None:
    cluster = autoscaler.cluster
    with Load(api_key, clients=1, pause_s=1.0) as load:
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
    load.assert_none_failed(at_least=10)


@pytest.mark.parametrize("kind", ["stopped", "killed"])
def test_without_an_api_server_it_serves_on_and_scales_nothing(autoscaler: Autoscaler, api_key: str, kind: str) -> None:
    cluster, plane = autoscaler.cluster, autoscaler.cluster.plane
    before = autoscaler.renewed()
    with Load(api_key, clients=1, pause_s=0.3) as load:
        load.wait_for_answers(2)
        changes = autoscaler.num_changes()
        if kind == "stopped":
            plane.signal("kube-apiserver", signal.SIGSTOP)
        else:
            plane.end("kube-apiserver", signal.SIGKILL)
        load.wait_for_answers(10)
        time.sleep(OUTAGE_S)
        assert autoscaler.num_changes() == changes
        if kind == "stopped":
            plane.signal("kube-apiserver", signal.SIGCONT)
        else:
            plane.start("kube-apiserver")
        plane.wait_ready()
        cluster.wait_for(lambda: autoscaler.renewed() > before and autoscaler.leader(), "a leader again")
        load.wait_for_answers(4)
    load.assert_none_failed(at_least=16)
    with Load(api_key, clients=BURST, patient=False) as burst:
        cluster.wait_for(lambda: cluster.replicas(DECODE) > 1, "it to act again", timeout_s=90)
    burst.assert_none_failed()


def test_pods_that_do_not_start_are_said_and_not_asked_for_without_end(autoscaler: Autoscaler, api_key: str) -> None:
    cluster = autoscaler.cluster
    secret = secret_of(cluster, "pdmesh-redis")
    (first,) = cluster.ready_pods(DECODE)
    cluster.plane.kubectl("-n", NAMESPACE, "delete", "secret", "pdmesh-redis")
    try:
        with Load(api_key, clients=BURST, patient=False) as load:
            cluster.wait_for(lambda: "CreateContainerConfigError" in cluster.waiting(DECODE), "a start that fails", timeout_s=90)
            cluster.wait_for(lambda: FAILED_STARTS.search(autoscaler.logs()), "the autoscaler to notice", timeout_s=120)
            ends = time.monotonic() + 2 * COOL_DOWN_S
            while time.monotonic() < ends:
                assert cluster.replicas(DECODE) <= MAX_DECODE and cluster.ready_pods(DECODE) == [first]
                time.sleep(0.5)
            cluster.apply([secret])
            cluster.wait_for(lambda: len(cluster.ready_pods(DECODE)) > 1, "them to start after all", timeout_s=120)
    finally:
        cluster.apply([secret])
    load.assert_none_failed(at_least=10)


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
