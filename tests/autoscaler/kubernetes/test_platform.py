"""Scaling, people's changes and what is saved, over real HTTP."""

from __future__ import annotations

import json

import pytest

from pdmesh.autoscaler.kubernetes import objects
from pdmesh.autoscaler.kubernetes.platform import KubernetesPlatform
from pdmesh.autoscaler.platform import Asked, PlatformError
from pdmesh.autoscaler.views import Hold, PoolDecision, PoolName
from tests.autoscaler.kubernetes.api_server import DEPLOYMENTS, EVENTS, LEASES, MAPS, ApiServer
from tests.autoscaler.kubernetes.conftest import Open
from tests.autoscaler.kubernetes.walls import Wall

NOW_S = 50.0
PREFILL, DECODE = PoolName.PREFILL, PoolName.DECODE


def _decision(replicas: int, name: PoolName = DECODE, reason: str = "12 requests wait") -> PoolDecision:
    return PoolDecision(name, 2, replicas, reason)


async def _leading(candidate: Open, **changes: object) -> KubernetesPlatform:
    platform = await candidate(**changes)
    assert await platform.leads(NOW_S)
    await platform.observe(NOW_S)
    return platform


async def test_pools_have_what_their_deployments_are_asked_for(candidate: Open, server: ApiServer) -> None:
    platform = await candidate()
    server.deployment("pdmesh-prefill", 0)
    assert await platform.leads(NOW_S)
    assert await platform.observe(NOW_S) == {PREFILL: Asked(0), DECODE: Asked(2)}


async def test_scaling_asks_for_replicas_and_says_why(candidate: Open, server: ApiServer) -> None:
    platform = await _leading(candidate)
    await platform.scale(_decision(5), 5, NOW_S)
    await platform.scale(_decision(5), 5, NOW_S)  # idempotent
    assert server.replicas("pdmesh-decode") == 5 and server.replicas("pdmesh-prefill") == 2
    (event,) = server.events()
    assert (event["reason"], event["note"], event["type"]) == ("ScaledUp", "2 → 5 replicas: 12 requests wait", "Normal")
    assert event["regarding"]["name"] == "pdmesh-decode"
    assert event["regarding"]["uid"] == server.objects[f"{DEPLOYMENTS}/pdmesh-decode"]["metadata"]["uid"]
    assert await platform.observe(NOW_S) == {PREFILL: Asked(2), DECODE: Asked(5)}
    await platform.scale(_decision(3), 3, NOW_S)  # a second time without another look
    await platform.scale(_decision(4), 4, NOW_S)
    assert [each["reason"] for each in server.events()] == ["ScaledUp", "ScaledDown", "ScaledUp"]


async def test_what_others_change_about_a_deployment_is_no_reason_to_wait(candidate: Open, server: ApiServer) -> None:
    platform = await _leading(candidate)
    server.touch("pdmesh-decode")
    await platform.scale(_decision(5), 5, NOW_S)
    assert server.replicas("pdmesh-decode") == 5


async def test_a_persons_change_stays_for_a_while(candidate: Open, server: ApiServer, wall: Wall) -> None:
    platform = await _leading(candidate)
    await platform.scale(_decision(5), 5, NOW_S)
    server.person_scales("pdmesh-decode", 9)
    assert (await platform.observe(NOW_S))[DECODE] == Asked(9, Hold("kubectl", NOW_S + 600))
    with pytest.raises(PlatformError, match="held by kubectl"):
        await platform.scale(_decision(5), 5, NOW_S)
    wall.now_s += 599
    assert (await platform.observe(NOW_S + 599))[DECODE].hold == Hold("kubectl", NOW_S + 600)
    wall.now_s += 1
    assert await platform.observe(NOW_S + 600) == {PREFILL: Asked(2), DECODE: Asked(9)}
    await platform.scale(_decision(5), 5, NOW_S + 600)
    assert server.replicas("pdmesh-decode") == 5
    assert (await platform.observe(NOW_S + 601))[DECODE] == Asked(5)
    assert [each["reason"] for each in server.events()] == ["ScaledUp", "ManualChange", "ScaledDown"]


async def test_a_change_that_nobody_has_seen_yet_is_not_overwritten(candidate: Open, server: ApiServer) -> None:
    platform = await _leading(candidate)
    server.person_scales("pdmesh-decode", 9)
    with pytest.raises(PlatformError, match="nothing was overwritten"):
        await platform.scale(_decision(5), 5, NOW_S)
    assert server.replicas("pdmesh-decode") == 9
    assert (await platform.observe(NOW_S))[DECODE].hold == Hold("kubectl", NOW_S + 600)


async def test_nor_is_a_change_scaled_that_an_annotation_forbids_meanwhile(candidate: Open, server: ApiServer) -> None:
    platform = await _leading(candidate)
    server.annotate("pdmesh-decode", autoscale="off")
    with pytest.raises(PlatformError, match="nothing was overwritten"):
        await platform.scale(_decision(5), 5, NOW_S)
    assert server.replicas("pdmesh-decode") == 2


async def test_annotations_hold_one_pool_and_not_the_other(candidate: Open, server: ApiServer, wall: Wall) -> None:
    platform = await _leading(candidate)
    server.annotate("pdmesh-decode", autoscale="off")
    server.annotate("pdmesh-prefill", hold_until=objects.time(wall.now_s + 50))
    found = await platform.observe(NOW_S)
    assert found[DECODE].hold == Hold("the annotation pdmesh.io/autoscale", NOW_S + 600)
    assert found[PREFILL].hold == Hold("the annotation pdmesh.io/hold-until", NOW_S + 50)
    wall.now_s += 50
    await platform.observe(NOW_S + 50)
    await platform.scale(_decision(3, PREFILL), 3, NOW_S + 50)
    assert server.replicas("pdmesh-prefill") == 3
    server.annotate("pdmesh-decode", autoscale="of")
    assert (await platform.observe(NOW_S))[DECODE].hold is not None
    warnings = [each for each in server.events() if each["type"] == "Warning"]
    await platform.observe(NOW_S)
    assert len(warnings) == 1 and "neither on nor off" in warnings[0]["note"]


async def test_a_hold_that_a_person_has_ended_is_over_for_the_next_leader_too(candidate: Open, server: ApiServer) -> None:
    first = await _leading(candidate)
    server.person_scales("pdmesh-decode", 9)
    server.annotate("pdmesh-prefill", autoscale="off")
    server.annotate("pdmesh-decode", hold_until="2030-01-01T00:00:00Z")
    assert (await first.observe(NOW_S))[DECODE].hold is not None
    await first.close()
    server.annotate("pdmesh-decode", hold_until=None)  # while nobody leads
    second = await _leading(candidate)
    assert (await second.observe(NOW_S))[DECODE] == Asked(9)
    await second.scale(_decision(5), 5, NOW_S)
    assert server.replicas("pdmesh-decode") == 5
    assert [each["reason"] for each in server.events()] == ["ManualChange", "HoldEnded", "ScaledDown"]


async def test_on_a_server_that_does_not_note_scaling_nobody_is_named(candidate: Open, server: ApiServer) -> None:
    applied = [{"manager": "kubectl-client-side-apply", "time": "t", "fieldsV1": {"f:spec": {"f:replicas": {}}}}]
    path = f"{DEPLOYMENTS}/pdmesh-decode"
    server.put(path, server.objects[path] | {"metadata": server.objects[path]["metadata"] | {"managedFields": applied}})
    platform = await _leading(candidate)
    server.put(path, server.objects[path] | {"spec": {"replicas": 9}})
    hold = (await platform.observe(NOW_S))[DECODE].hold
    assert hold is not None and hold.by == "someone (kubectl scale or another client)"


async def test_a_persons_change_is_honoured_by_the_next_leader(candidate: Open, server: ApiServer, wall: Wall) -> None:
    first = await _leading(candidate)
    await first.scale(_decision(5), 5, NOW_S)
    server.person_scales("pdmesh-decode", 9)
    await first.observe(NOW_S)
    await first.close()
    wall.now_s += 100
    second = await _leading(candidate)
    assert (await second.observe(7.0))[DECODE] == Asked(9, Hold("kubectl", 7.0 + 500))


async def test_so_is_one_that_was_made_while_nobody_led(candidate: Open, server: ApiServer) -> None:
    first = await _leading(candidate)
    await first.scale(_decision(5), 5, NOW_S)
    await first.close()
    server.person_scales("pdmesh-decode", 9)
    second = await _leading(candidate)
    assert (await second.observe(NOW_S))[DECODE].hold == Hold("kubectl", NOW_S + 600)


@pytest.mark.parametrize("arrived", [True, False])
async def test_what_was_asked_for_without_an_answer_is_no_persons_change(
    candidate: Open, server: ApiServer, arrived: bool
) -> None:
    """The leader dies between its note and the answer."""
    first = await _leading(candidate)
    server.refuse[f"PATCH {DEPLOYMENTS}"] = 500
    with pytest.raises(PlatformError, match="500"):
        await first.scale(_decision(5), 5, NOW_S)
    server.refuse.clear()
    if arrived:
        server.put(f"{DEPLOYMENTS}/pdmesh-decode", server.objects[f"{DEPLOYMENTS}/pdmesh-decode"] | {"spec": {"replicas": 5}})
    await first.close()
    second = await _leading(candidate)
    assert (await second.observe(NOW_S))[DECODE] == Asked(5 if arrived else 2)


async def test_a_period_of_zero_honours_nothing(candidate: Open, server: ApiServer) -> None:
    platform = await _leading(candidate, manual_hold_s=0.0)
    await platform.scale(_decision(5), 5, NOW_S)
    server.person_scales("pdmesh-decode", 9)
    assert (await platform.observe(NOW_S))[DECODE] == Asked(9)
    await platform.scale(_decision(5), 5, NOW_S)
    assert [each["reason"] for each in server.events()] == ["ScaledUp", "ScaledDown"]


async def test_a_deployment_that_was_made_anew_is_taken_as_it_is(candidate: Open, server: ApiServer) -> None:
    platform = await _leading(candidate)
    await platform.scale(_decision(5), 5, NOW_S)
    server.deployment("pdmesh-decode", 1)
    assert (await platform.observe(NOW_S))[DECODE] == Asked(1)


async def test_one_pool_of_workers_with_both_roles(candidate: Open, server: ApiServer) -> None:
    server.deployment("workers", 3)
    platform = await _leading(candidate, both_deployment="workers")
    assert await platform.observe(NOW_S) == {PoolName.BOTH: Asked(3)}


async def test_a_deployment_that_is_not_there_is_named_with_its_flag(candidate: Open, server: ApiServer) -> None:
    platform = await candidate(decode_deployment="nowhere")
    assert await platform.leads(NOW_S)
    with pytest.raises(PlatformError, match=r"decode: Deployment nowhere: does not exist; .*--…-decode-deployment"):
        await platform.observe(NOW_S)


async def test_state_is_there_for_the_next_leader(candidate: Open, server: ApiServer) -> None:
    first = await _leading(candidate)
    assert await first.load() is None
    await first.save({"format": 1, "x": [1.5, "é"]})
    await first.save({"format": 2})
    await first.close()
    second = await _leading(candidate)
    assert await second.load() == {"format": 2}
    await second.scale(_decision(5), 5, NOW_S)
    assert await second.load() == {"format": 2}  # what it notes itself stands beside


async def test_state_that_somebody_has_broken_or_taken_away_is_begun_anew(candidate: Open, server: ApiServer) -> None:
    platform = await _leading(candidate)
    path = f"{MAPS}/pdmesh-autoscaler-state"
    await platform.save({"a": 1})
    server.put(path, server.objects[path] | {"data": {"policy.json": "{", "asked.json": "[1]"}})
    assert await platform.load() is None
    server.put(path, server.objects[path])
    await platform.save({"a": 2})  # edited since it was read: the version is read again
    assert json.loads(server.objects[path]["data"]["policy.json"]) == {"a": 2}
    del server.objects[path]
    await platform.save({"a": 3})
    assert await platform.load() == {"a": 3}


@pytest.mark.parametrize(("state", "told"), [({"a": float("nan")}, "JSON"), ({"a": "x" * 400_000}, "bytes, more than")])
async def test_state_that_cannot_be_saved_is_refused(candidate: Open, state: dict[str, object], told: str) -> None:
    platform = await _leading(candidate)
    with pytest.raises(PlatformError, match=told):
        await platform.save(state)


async def test_starts_that_fail_are_a_warning_where_people_look(candidate: Open, server: ApiServer) -> None:
    platform = await _leading(candidate)
    await platform.starts_failed(DECODE, "1 of 2 replicas: not started within 300 s")
    (event,) = server.events()
    assert (event["reason"], event["type"], event["action"]) == ("FailedStart", "Warning", "Start")
    assert event["regarding"]["name"] == "pdmesh-decode"
    assert event["note"] == "1 of 2 replicas: not started within 300 s; see kubectl describe pod"


async def test_events_that_cannot_be_written_hinder_nothing(candidate: Open, server: ApiServer) -> None:
    server.refuse[f"POST {EVENTS}"] = 403
    platform = await _leading(candidate)
    await platform.scale(_decision(5), 5, NOW_S)
    assert server.replicas("pdmesh-decode") == 5


async def test_a_right_that_is_missing_is_named_with_what_to_do(candidate: Open, server: ApiServer) -> None:
    server.refuse[f"PATCH {DEPLOYMENTS}"] = 403
    platform = await _leading(candidate)
    with pytest.raises(PlatformError, match=r"PATCH mesh/deployments/pdmesh-decode/scale: 403 .*rbac\.yaml"):
        await platform.scale(_decision(5), 5, NOW_S)
    assert [path for method, path in server.requests if method == "PATCH" and path.endswith("/scale")]


async def test_who_has_ceased_to_lead_writes_nothing(candidate: Open, server: ApiServer) -> None:
    platform = await _leading(candidate)
    lease = server.objects[f"{LEASES}/pdmesh-autoscaler"]
    server.put(f"{LEASES}/pdmesh-autoscaler", lease | {"spec": lease["spec"] | {"holderIdentity": "another"}})
    platform._elector._election.seen(None, 0.0)  # as its next attempt will
    before = dict(server.objects)
    with pytest.raises(PlatformError, match="lead"):
        await platform.scale(_decision(5), 5, NOW_S)
    with pytest.raises(PlatformError, match="lead"):
        await platform.save({"a": 1})
    assert server.replicas("pdmesh-decode") == 2
    assert server.objects.keys() == before.keys()


async def test_scaling_before_looking_is_refused(candidate: Open) -> None:
    platform = await candidate()
    assert await platform.leads(NOW_S)
    with pytest.raises(PlatformError, match="observe comes first"):
        await platform.scale(_decision(5), 5, NOW_S)
