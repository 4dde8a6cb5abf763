"""One pod, from its binding to a node to its removal."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Iterable
from pathlib import Path

from tests.cluster import network
from tests.cluster.agent.api import MERGE_PATCH, Api, ApiError, Object
from tests.cluster.agent.images import Image
from tests.cluster.agent.running import Container, Surroundings, now
from tests.cluster.agent.sandbox import Sandbox
from tests.cluster.agent.volumes import NotYet, Sources, environment, make_volumes

_RETRY_S = 1.0
_FINAL = ("Succeeded", "Failed")


class Pod:
    """`run` does it all; `update` brings newer versions of the object."""

    def __init__(self, first: Object, number: int, folder: Path, api: Api, images: dict[str, Image]) -> None:
        self.latest = first
        self._api, self._images = api, images
        self._folder = folder
        self._sandbox = Sandbox(number)
        self._containers: list[Container] = []
        self._inits: list[Container] = []
        self._deleted = asyncio.Event()
        self._changed = asyncio.Event()
        self._problem: tuple[str, str] | None = None
        self._phase = "Pending"
        self._started_at = now()
        self.update(first)

    @property
    def uid(self) -> str:
        """A pod that is made again has another one."""
        return str(self.latest["metadata"]["uid"])

    @property
    def _path(self) -> str:
        metadata = self.latest["metadata"]
        return f"/api/v1/namespaces/{metadata['namespace']}/pods/{metadata['name']}"

    def update(self, pod: Object) -> None:
        """The server's newest version."""
        self.latest = pod
        if pod["metadata"].get("deletionTimestamp"):
            self._deleted.set()

    def vanish(self) -> None:
        """The server has it no more."""
        self.latest = {**self.latest, "metadata": {**self.latest["metadata"], "deletionGracePeriodSeconds": 0}}
        self._deleted.set()

    async def run(self) -> None:
        """Returns when nothing of it is left. Whatever goes wrong stands in its status."""
        self._folder.mkdir(parents=True)
        reporting = asyncio.create_task(self._report())
        living = asyncio.create_task(self._live())
        try:
            await self._deleted.wait()
            await self._stop()
        finally:
            for task in (living, reporting):
                task.cancel()
            await asyncio.gather(living, reporting, return_exceptions=True)
            await self._sandbox.close()
            shutil.rmtree(self._folder / "volumes", ignore_errors=True)
        await self._remove()

    async def _live(self) -> None:
        try:
            await self._sandbox.open()
            volumes = await self._patiently_volumes()
            for spec in self.latest["spec"].get("initContainers") or ():
                await self._run_init(spec, volumes)
            await self._run_containers(volumes)
        except (OSError, ValueError, RuntimeError) as error:
            self._problem = ("CreateContainerError", str(error))
            self._changed.set()

    async def _run_init(self, spec: Object, volumes: dict[str, Path]) -> None:
        container = await self._made(spec, volumes)
        self._inits.append(container)
        policy = "Never" if self._policy == "Never" else "OnFailure"
        if await container.run(policy) != 0:
            self._phase = "Failed"
            raise RuntimeError(f"init container {spec['name']} failed")

    async def _run_containers(self, volumes: dict[str, Path]) -> None:
        self._containers = [await self._made(spec, volumes) for spec in self.latest["spec"]["containers"]]
        self._phase = "Running"
        codes = await asyncio.gather(*(container.run(self._policy) for container in self._containers))
        if not self._deleted.is_set():
            self._phase = "Failed" if any(codes) else "Succeeded"
            self._changed.set()

    @property
    def _policy(self) -> str:
        return str(self.latest["spec"].get("restartPolicy", "Always"))

    async def _patiently_volumes(self) -> dict[str, Path]:
        while True:
            try:
                return await make_volumes(self.latest, self._folder, self._sources())
            except (NotYet, ApiError) as error:
                await self._wait("ContainerCreating", str(error))

    async def _made(self, spec: Object, volumes: dict[str, Path]) -> Container:
        """A container whose image and sources are there; until then the pod says what it waits for."""
        resolver = self._folder / "resolv.conf"
        resolver.write_text(network.resolv_conf(self.latest["metadata"]["namespace"]), encoding="ascii")
        while True:
            image = self._images.get(spec["image"])
            if image is None:
                await self._wait("ImagePullBackOff", f'Back-off pulling image "{spec["image"]}"')
                continue
            try:
                variables = await environment(self.latest, spec, self._sandbox.address, self._sources())
            except (NotYet, ApiError) as error:
                await self._wait("CreateContainerConfigError", str(error))
                continue
            self._problem = None
            around = Surroundings(self.latest, self._folder, self._sandbox, image, variables, volumes, resolver)
            return Container(spec, around, self._changed.set)

    def _sources(self) -> Sources:
        return Sources(self._api, self.latest["metadata"]["namespace"])

    async def _wait(self, reason: str, message: str) -> None:
        if self._problem != (reason, message):
            self._problem = (reason, message)
            self._changed.set()
        await asyncio.sleep(_RETRY_S)

    async def _stop(self) -> None:
        grace_s = float(self.latest["metadata"].get("deletionGracePeriodSeconds") or 0)
        deadline = time.monotonic() + grace_s
        await asyncio.gather(*(container.stop(deadline) for container in (*self._inits, *self._containers)))

    async def _remove(self) -> None:
        """Takes the object away, for good; as long as it takes to reach the server."""
        body = {"gracePeriodSeconds": 0, "preconditions": {"uid": self.uid}}
        while True:
            try:
                await self._api.call("DELETE", self._path, body)
                return
            except ApiError as error:
                if error.status in (404, 409):  # gone, or another one has its name
                    return
            await asyncio.sleep(_RETRY_S)

    async def _report(self) -> None:
        """Tells the server, now and after each change; a server that is away hears it when it is back."""
        self._changed.set()
        while True:
            await self._changed.wait()
            self._changed.clear()
            try:
                await self._api.call("PATCH", f"{self._path}/status", {"status": self._status()}, kind=MERGE_PATCH)
            except ApiError as error:
                if error.status == 404:
                    return
                self._changed.set()
                await asyncio.sleep(_RETRY_S)

    def _status(self) -> Object:
        ready = bool(self._containers) and all(container.state.ready for container in self._containers)
        initialized = bool(self._containers)
        status: Object = {
            "phase": self._phase,
            "startTime": self._started_at,
            "hostIP": network.GATEWAY,
            "conditions": self._conditions({"Initialized": initialized, "ContainersReady": ready, "Ready": ready}),
            "containerStatuses": self._shown(self.latest["spec"]["containers"], self._containers),
        }
        if specs := self.latest["spec"].get("initContainers"):
            status["initContainerStatuses"] = self._shown(specs, self._inits)
        if self._containers or self._inits:
            status["podIP"] = self._sandbox.address
            status["podIPs"] = [{"ip": self._sandbox.address}]
        return status

    def _shown(self, specs: Iterable[Object], containers: list[Container]) -> list[Object]:
        made = {container.spec["name"]: container.status() for container in containers}
        return [made.get(spec["name"]) or self._not_made(spec) for spec in specs]

    def _not_made(self, spec: Object) -> Object:
        reason, message = self._problem or ("PodInitializing" if self._inits else "ContainerCreating", "")
        waiting = {"waiting": {"reason": reason, "message": message}}
        shown = {"name": spec["name"], "image": spec["image"], "imageID": "", "ready": False, "restartCount": 0}
        return {**shown, "started": False, "state": waiting, "lastState": {}}

    def _conditions(self, truths: dict[str, bool]) -> list[Object]:
        """With the others' (the scheduler's); a time changes only with its truth."""
        before = {condition["type"]: condition for condition in self.latest.get("status", {}).get("conditions") or ()}
        for kind, truth in truths.items():
            text = "True" if truth else "False"
            if before.get(kind, {}).get("status") != text:
                before[kind] = {"type": kind, "status": text, "lastTransitionTime": now()}
        return list(before.values())
