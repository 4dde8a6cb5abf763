"""Pods of an InferencePool, and what becomes of endpoints when the API server says nothing."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from router.endpoint_picker.sources import PoolFollower, is_ready, ports_of, selector_of
from tests.support.waiting import eventually

POOL = {
    "spec": {
        "selector": {"matchLabels": {"pdmesh-pool": "blue", "app.kubernetes.io/name": "pdmesh-decode"}},
        "targetPorts": [{"number": 8000}, {"number": 8001}],
    }
}


def pod(ip: str = "10.0.0.1", *, ready: str = "True", ends: str | None = None) -> Any:
    conditions = [SimpleNamespace(type="PodScheduled", status="True"), SimpleNamespace(type="Ready", status=ready)]
    return SimpleNamespace(
        metadata=SimpleNamespace(deletion_timestamp=ends), status=SimpleNamespace(pod_ip=ip, conditions=conditions)
    )


def test_selector_and_ports() -> None:
    assert selector_of(POOL) == "app.kubernetes.io/name=pdmesh-decode,pdmesh-pool=blue"
    assert ports_of(POOL) == [8000, 8001]


@pytest.mark.parametrize("spec", [{}, {"selector": {}}, {"selector": {"matchLabels": {}}}, {"selector": {"matchLabels": "x"}}])
def test_a_pool_that_selects_everything_is_refused(spec: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="matchLabels"):
        selector_of({"spec": spec})


@pytest.mark.parametrize("ports", [[], [{}], [{"number": "http"}], [{"number": 0}], [{"number": 70000}]])
def test_ports_that_are_none_are_refused(ports: list[object]) -> None:
    with pytest.raises(ValueError, match="targetPorts"):
        ports_of({"spec": {"targetPorts": ports}})


def test_only_ready_pods_that_stay_take_requests() -> None:
    assert is_ready(pod())
    assert not is_ready(pod(ready="False"))
    assert not is_ready(pod(ip=""))
    assert not is_ready(pod(ends="2026-01-01T00:00:00Z"))
    assert not is_ready(SimpleNamespace(metadata=SimpleNamespace(deletion_timestamp=None), status=None))


async def test_an_api_server_that_fails_changes_nothing() -> None:
    answers: list[list[str] | None] = [["10.0.0.2:80", "10.0.0.1:80"], None, None, ["10.0.0.1:80"]]
    found: list[list[str]] = []
    asked = 0

    def listed() -> list[str]:
        nonlocal asked
        answer = answers[min(asked, len(answers) - 1)]
        asked += 1
        if answer is None:
            raise RuntimeError("no route to host")
        return answer

    follower = PoolFollower(listed, found.append, 0.01)
    follower.start()
    await eventually(lambda: asked >= 6)
    await follower.stop()
    assert found == [["10.0.0.1:80", "10.0.0.2:80"], ["10.0.0.1:80"]], "told once each, in order"
