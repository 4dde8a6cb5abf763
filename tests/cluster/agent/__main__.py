"""The agent as a process: its nodes, their pods, names and Services. Ends on SIGTERM, and its pods with it.

python -m tests.cluster.agent SETTINGS.json
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.cluster import network
from tests.cluster.agent.api import Api, Mirror, Object
from tests.cluster.agent.images import Image, catalogue
from tests.cluster.agent.names import PORT, NameServer
from tests.cluster.agent.node import Node
from tests.cluster.agent.pod import Pod
from tests.cluster.agent.services import ServiceProxy


@dataclass(frozen=True)
class Settings:
    """What `cluster.py` writes for it."""

    url: str
    token: str
    ca: str
    folder: str
    model: str
    kernels: str
    nodes: list[str]


class Agent:
    """All of it."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._api = Api(settings.url, settings.token, settings.ca)
        self._images: dict[str, Image] = catalogue(Path(settings.model), Path(settings.kernels))
        self._pods: dict[str, Pod] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._count = 0
        self._services_changed = asyncio.Event()
        self._pod_mirror = Mirror(self._api, "/api/v1/pods", self._reconcile, where=self._is_ours)
        self._services = Mirror(self._api, "/api/v1/services", self._services_changed.set)
        self._endpoints = Mirror(self._api, "/api/v1/endpoints", lambda: None)
        self._proxy = ServiceProxy(lambda: self._endpoints.objects)

    async def run(self) -> None:
        """Until it is cancelled; then all pods end at once, without grace."""
        loop = asyncio.get_running_loop()
        await loop.create_datagram_endpoint(
            lambda: NameServer(lambda: (self._services.objects, self._endpoints.objects)), (network.DNS_SERVICE, PORT)
        )
        mirrors = (self._pod_mirror, self._services, self._endpoints)
        nodes = [Node(self._api, name) for name in self._settings.nodes]
        try:
            running = [*(mirror.run() for mirror in mirrors), *(node.run() for node in nodes), self._follow_services()]
            await asyncio.gather(*running)
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await self._api.close()

    def _is_ours(self, pod: Object) -> bool:
        return pod["spec"].get("nodeName") in self._settings.nodes

    def _reconcile(self) -> None:
        there = {pod["metadata"]["uid"]: pod for pod in self._pod_mirror.objects.values()}
        for uid, pod in there.items():
            if uid in self._pods:
                self._pods[uid].update(pod)
            else:
                self._start(uid, pod)
        for uid in self._pods.keys() - there.keys():
            self._pods[uid].vanish()

    def _start(self, uid: str, pod: Object) -> None:
        metadata = pod["metadata"]
        folder = Path(self._settings.folder) / f"{metadata['namespace']}_{metadata['name']}_{uid[:8]}"
        self._pods[uid] = made = Pod(pod, self._count, folder, self._api, self._images)
        self._count += 1
        task = asyncio.create_task(made.run())
        self._tasks.add(task)
        task.add_done_callback(lambda done: self._forget(uid, done))

    def _forget(self, uid: str, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._pods.pop(uid, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            print(f"pod {uid}: {error!r}", file=sys.stderr, flush=True)

    async def _follow_services(self) -> None:
        while True:
            await self._services_changed.wait()
            self._services_changed.clear()
            await self._proxy.set(self._services.objects)


async def _main(settings: Settings) -> None:
    agent = Agent(settings)
    task = asyncio.create_task(agent.run())
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    try:
        await task
    except asyncio.CancelledError:
        print("ended", file=sys.stderr)


if __name__ == "__main__":
    asyncio.run(_main(Settings(**json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))))
