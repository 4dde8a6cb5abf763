"""The mesh runs from its manifests: it answers, and is rolled out and scaled without a failed request."""

from __future__ import annotations

import pytest

from pdmesh.client.client import Client
from pdmesh.errors import MeshError
from tests.cluster.cluster import ROUTER, Cluster
from tests.cluster.conftest import MESH
from tests.cluster.load import Load


def test_a_chat_is_answered_by_way_of_prefill_and_decode(mesh: Cluster, api_key: str) -> None:
    with Client(ROUTER, api_key=api_key) as client:
        answer = client.chat(
            [("user", "What is the capital of France?")], temperature=0, max_tokens=24, mode="remote", timeout=60
        )
    assert "Paris" in answer.text
    assert answer.timings.prefill_worker in mesh.ready_pods("pdmesh-prefill")
    assert answer.timings.decode_worker in mesh.ready_pods("pdmesh-decode")
    assert answer.timings.transport == "tcp"


def test_without_a_key_nobody_is_answered(mesh: Cluster) -> None:
    with Client(ROUTER) as client, pytest.raises(MeshError, match="key"):
        client.chat([("user", "Hello")], max_tokens=1, timeout=20)


def test_all_pods_are_what_the_manifests_say(mesh: Cluster) -> None:
    for name in MESH:
        (pod,) = [pod for pod in mesh.pods(name) if "deletionTimestamp" not in pod["metadata"]]
        assert [status["restartCount"] for status in pod["status"]["containerStatuses"]] == [0]
    assert {pod["spec"]["nodeName"] for name in MESH for pod in mesh.pods(name)} == {"node-a", "node-b"}


def test_decode_is_restarted_under_load_without_a_failed_request(mesh: Cluster, api_key: str) -> None:
    before = mesh.ready_pods("pdmesh-decode")
    with Load(api_key) as load:
        load.wait_for_answers(4)
        mesh.plane.kubectl("-n", "pdmesh", "rollout", "restart", "deployment/pdmesh-decode")
        mesh.wait_rolled_out("pdmesh-decode")
        mesh.wait_for(lambda: len(mesh.pods("pdmesh-decode")) == 1, "the old pod to go")
        load.wait_for_answers(4)
        load.wait_until_answered(12)
    load.assert_none_failed(at_least=12)
    assert not set(mesh.ready_pods("pdmesh-decode")) & set(before)
    assert {outcome.decode_worker for outcome in load.outcomes} >= {*before, *mesh.ready_pods("pdmesh-decode")}


def test_a_person_scales_up_and_down_without_a_failed_request(mesh: Cluster, api_key: str) -> None:
    with Load(api_key, clients=3) as load:
        mesh.scale("pdmesh-decode", 2)
        mesh.wait_rolled_out("pdmesh-decode")
        mesh.wait_for(lambda: {o.decode_worker for o in load.outcomes} >= set(mesh.ready_pods("pdmesh-decode")), "both to serve")
        mesh.scale("pdmesh-decode", 1)
        mesh.wait_for(lambda: len(mesh.pods("pdmesh-decode")) == 1, "one to drain and go", timeout_s=120)
        load.wait_for_answers(6)
        load.wait_until_answered(12)
    load.assert_none_failed(at_least=12)


def test_a_router_is_replaced_without_a_failed_request(mesh: Cluster, api_key: str) -> None:
    (before,) = mesh.ready_pods("pdmesh-router")
    # Streams that outlast the router's grace are resumed by their clients, as the manifest says.
    with Load(api_key, resume_s=30) as load:
        load.wait_for_answers(4)
        mesh.plane.kubectl("-n", "pdmesh", "rollout", "restart", "deployment/pdmesh-router")
        mesh.wait_rolled_out("pdmesh-router")
        mesh.wait_for(lambda: len(mesh.pods("pdmesh-router")) == 1, "the old router to go", timeout_s=120)
        load.wait_for_answers(4)
        load.wait_until_answered(12)
    load.assert_none_failed(at_least=12)
    assert before not in mesh.ready_pods("pdmesh-router")


def test_a_rollout_that_cannot_start_takes_nothing_away(mesh: Cluster, api_key: str) -> None:
    before = mesh.ready_pods("pdmesh-decode")
    with Load(api_key) as load:
        mesh.plane.kubectl("-n", "pdmesh", "set", "env", "deployment/pdmesh-decode", "PDMESH_KV_MEMORY_MB=-1")
        mesh.wait_for(lambda: "CrashLoopBackOff" in mesh.waiting("pdmesh-decode"), "the new pod to fail again and again")
        assert mesh.ready_pods("pdmesh-decode") == before
        mesh.plane.kubectl("-n", "pdmesh", "rollout", "undo", "deployment/pdmesh-decode")
        mesh.wait_rolled_out("pdmesh-decode")
        mesh.plane.kubectl("-n", "pdmesh", "set", "image", "deployment/pdmesh-decode", "decode=pdmesh-worker-cpu:0.0.0")
        mesh.wait_for(lambda: "ImagePullBackOff" in mesh.waiting("pdmesh-decode"), "the new pod to find no image")
        assert mesh.ready_pods("pdmesh-decode") == before
        mesh.plane.kubectl("-n", "pdmesh", "rollout", "undo", "deployment/pdmesh-decode")
        mesh.wait_rolled_out("pdmesh-decode")
        load.wait_for_answers(2)
        load.wait_until_answered(6)
    load.assert_none_failed(at_least=6)
