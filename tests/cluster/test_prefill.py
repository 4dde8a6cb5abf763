"""Long prompts: prefill grows and shrinks on its Deployment, and a decode worker that is idle is lent to it and comes home."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cluster.autoscaling import DECODE, MAX_DECODE, PREFILL, TTFT_MS, Autoscaler
from tests.cluster.load import BURST, SELDOM_S, Kind, Load, reading

NUM_SEEN = 24
"""Answers after which what is known of prompts' lengths, which is smoothed over a minute, is that of these."""
SHARE = 0.4
"""Of the objective, that a prompt takes alone: one worker keeps it for who asks seldom, and not for a burst."""


@pytest.fixture(scope="module")
def autoscaler(autoscaler: Autoscaler) -> Iterator[Autoscaler]:
    """It may scale prefill, and lend workers."""
    with autoscaler.told({"PDMESH_PREFILL_MAX_REPLICAS": "3", "PDMESH_FLIPS": "true"}):
        yield autoscaler


@pytest.fixture(scope="module")
def long_prompts(autoscaler: Autoscaler, api_key: str) -> Kind:
    """So long that this machine keeps the objective with one of them at a time."""
    autoscaler.wait_until_small(PREFILL, DECODE)
    return reading(api_key, SHARE * TTFT_MS / 1000)


@pytest.fixture(autouse=True)
def quiet(autoscaler: Autoscaler) -> None:
    """Each test begins with one worker of each kind."""
    autoscaler.wait_until_small(PREFILL, DECODE)


def test_long_prompts_scale_prefill_up_and_their_end_scales_it_down(
    autoscaler: Autoscaler, api_key: str, long_prompts: Kind
) -> None:
    """Nobody is lent, as a person has decode to himself."""
    cluster = autoscaler.cluster
    (first,) = cluster.ready_pods(PREFILL)
    autoscaler.hold(DECODE)
    try:
        with Load(api_key, clients=1, pause_s=SELDOM_S) as light:
            with Load(api_key, clients=BURST, kind=long_prompts, pause_s=0) as burst:
                cluster.wait_for(lambda: cluster.replicas(PREFILL) > 1, "more replicas", timeout_s=150)
                cluster.wait_for(lambda: len(cluster.ready_pods(PREFILL)) > 1, "a new pod to be ready", timeout_s=120)
                cluster.wait_for(lambda: {o.prefill_worker for o in burst.outcomes} - {first, ""}, "a new pod to serve")
                burst.wait_until_answered(10)
            cluster.wait_for(lambda: cluster.replicas(PREFILL) == 1, "fewer replicas", timeout_s=200)
            cluster.wait_for(lambda: len(cluster.pods(PREFILL)) == 1, "the others to drain and go", timeout_s=120)
            light.wait_for_answers(2)
            light.wait_until_answered(5)
    finally:
        autoscaler.release(DECODE)
    burst.assert_none_failed(at_least=10)
    light.assert_none_failed(at_least=5)
    assert {"ScaledUp", "ScaledDown"} <= autoscaler.scaled_for_load(PREFILL), autoscaler.events(PREFILL)


def test_an_idle_decode_worker_is_lent_to_prefill_and_comes_home(
    autoscaler: Autoscaler, api_key: str, long_prompts: Kind
) -> None:
    """A person has had more decode workers than would do, and fewer prefill workers; and lets go of both."""
    cluster = autoscaler.cluster
    autoscaler.hold(PREFILL, DECODE)
    cluster.scale(DECODE, MAX_DECODE)
    try:
        cluster.wait_for(lambda: len(cluster.ready_pods(DECODE)) == MAX_DECODE, "the other workers", timeout_s=150)
        with Load(api_key, clients=1, pause_s=SELDOM_S) as light:
            with Load(api_key, clients=BURST, kind=long_prompts, pause_s=0) as burst:
                burst.wait_for_answers(NUM_SEEN, timeout_s=150)
                autoscaler.release(PREFILL, DECODE)
                cluster.wait_for(lambda: autoscaler.lent("decode", "prefill"), "a worker to be lent")
                lent = set(autoscaler.lent("decode", "prefill"))
                assert lent <= set(cluster.ready_pods(DECODE))
                cluster.wait_for(lambda: lent & {o.prefill_worker for o in burst.outcomes}, "one to compute prompts")
            cluster.wait_for(lambda: lent <= set(autoscaler.lent("prefill", "decode")), "them to come home", timeout_s=200)
            cluster.wait_for(lambda: cluster.replicas(DECODE) == 1, "fewer replicas", timeout_s=150)
            light.wait_for_answers(2)
            light.wait_until_answered(5)
    finally:
        autoscaler.release(PREFILL, DECODE)
    burst.assert_none_failed(at_least=NUM_SEEN)
    light.assert_none_failed(at_least=5)
