"""An API server, and candidates against it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from pdmesh.autoscaler.kubernetes.api import open_api
from pdmesh.autoscaler.kubernetes.platform import KubernetesPlatform
from pdmesh.autoscaler.kubernetes.settings import KubernetesSettings
from tests.autoscaler.kubernetes.api_server import NAMESPACE, ApiServer, api_server
from tests.autoscaler.kubernetes.walls import Wall

Open = Callable[..., Awaitable[KubernetesPlatform]]


@pytest.fixture
def server() -> Iterator[ApiServer]:
    with api_server() as started:
        yield started


@pytest.fixture
def wall() -> Wall:
    return Wall()


@pytest.fixture
async def candidate(server: ApiServer, tmp_path: Path, wall: Wall) -> AsyncIterator[Open]:
    """Makes a platform; its settings may differ from quick ones."""
    opened: list[KubernetesPlatform] = []

    async def make(**changes: object) -> KubernetesPlatform:
        quick: dict[str, object] = {
            "namespace": NAMESPACE, "kubeconfig": server.kubeconfig(tmp_path), "manual_hold_s": 600.0,
            "request_timeout_s": 0.5, "lease_duration_s": 2, "renew_deadline_s": 1.0, "retry_period_s": 0.1,
        }  # fmt: skip
        settings = KubernetesSettings(**(quick | changes))  # type: ignore[arg-type]
        settings.validate()
        platform = KubernetesPlatform(open_api(settings), NAMESPACE, settings, wall)
        opened.append(platform)
        return platform

    yield make
    for platform in opened:
        await platform.close()
