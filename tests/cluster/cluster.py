"""A whole cluster on this machine, in a network of its own: control plane, node agent, images, Secrets.

with Cluster(programs, folder, model) as cluster:
    cluster.apply(render(FOLDER / "overlays/cpu"))
    cluster.wait_rolled_out("pdmesh-router")
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from kvtransfer.native.library import PROJECT as TRANSFER
from pdmesh.engine.kernels.cpu import build
from pdmesh.platform import parent_death
from tests.cluster import control_plane
from tests.cluster.agent.__main__ import Settings
from tests.cluster.agent.images import CHECKOUT
from tests.cluster.control_plane import ControlPlane
from tests.cluster.overlay import definitions, mapped, text_of
from tests.k8s.kustomize import Manifest

NAMESPACE = "pdmesh"
NODES = ["node-a", "node-b"]
ROUTER = f"pdmesh-router.{NAMESPACE}.svc.cluster.local:8100"
_POLL_S = 0.25
_END_S = 20.0


class Cluster:
    """A context manager; of this process's network, which `network.enter` has made."""

    def __init__(self, programs: Path, folder: Path, model: Path) -> None:
        self.plane = ControlPlane(programs, folder / "control-plane")
        self._folder = folder
        self._model = model
        self._agent: subprocess.Popen[bytes] | None = None
        self._all_pids: list[int] = []

    def __enter__(self) -> Self:
        self._make_kernels()
        self.plane.__enter__()
        try:
            self._start_agent()
            self.wait_for(lambda: len(self.ready_nodes()) == len(NODES), "nodes to be ready")
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()

    def stop(self) -> None:
        """Ends pods, agent and control plane."""
        if self._agent is not None:
            self._agent.terminate()
            try:
                self._agent.wait(_END_S)
            except subprocess.TimeoutExpired:
                self._agent.kill()
                self._agent.wait()
        self.plane.stop()

    @property
    def folder(self) -> Path:
        """Of everything; logs/ holds what the containers say."""
        return self._folder

    def _make_kernels(self) -> None:
        """As the images have them, built from this checkout."""
        for project in (build.KERNELS, TRANSFER):
            tier = project.tier()
            target = self._folder / "kernels" / tier.name / project.library
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(build.build_ahead(tier, None, project=project), target)

    def _start_agent(self) -> None:
        token = self.plane.token("node-agent")
        folders = {"folder": str(self._folder / "pods"), "model": str(self._model), "kernels": str(self._folder / "kernels")}
        settings = Settings(url=control_plane.URL, token=token, ca=str(self.plane.ca), nodes=NODES, **folders)
        path = self._folder / "agent.json"
        path.touch(0o600)
        path.write_text(json.dumps(asdict(settings)), encoding="utf-8")
        command = parent_death.tied([sys.executable, "-m", "tests.cluster.agent", str(path)]).argv
        with (self._folder / "agent.log").open("ab") as log:
            self._agent = subprocess.Popen(command, cwd=CHECKOUT, stdout=log, stderr=log, start_new_session=True)

    def ready_nodes(self) -> list[str]:
        """Names of the nodes that the control plane has seen ready and gives pods to."""
        nodes = self.plane.get("nodes")["items"]
        return [
            node["metadata"]["name"]
            for node in nodes
            if not node["spec"].get("taints")
            and any(entry["type"] == "Ready" and entry["status"] == "True" for entry in node["status"].get("conditions", ()))
        ]

    def apply(self, manifests: Iterable[Manifest]) -> str:
        """Namespaces and kinds first, then the rest; what kubectl says. Raises RuntimeError."""
        objects = [mapped(manifest) for manifest in manifests]
        first = [*definitions(objects), *(item for item in objects if item["kind"] == "Namespace")]
        if first:
            self.plane.kubectl("apply", "-f", "-", stdin=text_of(first))
        if made := [item["metadata"]["name"] for item in first if item["kind"] == "CustomResourceDefinition"]:
            self.plane.kubectl("wait", "--for=condition=established", "--timeout=30s", *(f"crd/{name}" for name in made))
        rest = [item for item in objects if item not in first]
        return self.plane.kubectl("apply", "-f", "-", stdin=text_of(rest)) if rest else ""

    def make_secrets(self) -> str:
        """Those that the manifests ask for, as docs/kubernetes.md says; a client's API key."""
        password = secrets.token_hex(16)
        url = f"redis://:{password}@pdmesh-redis:6379/0"
        self._secret("pdmesh-redis", f"--from-literal=redis.conf=requirepass {password}", f"--from-literal=url={url}")
        self._secret("pdmesh-mesh-secret", f"--from-literal=secret={secrets.token_hex(32)}")
        keys = self._folder / "keys.json"
        command = [sys.executable, "-m", "pdmesh", "keys", "new", "test", "--admin", "--tenant=search", f"--api-keys={keys}"]
        made = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, check=True)
        self._secret("pdmesh-api-keys", f"--from-file=keys.json={keys}")
        key = made.stdout.strip().splitlines()[-1].split()[-1]
        self._secret("pdmesh-autoscaler", f"--from-literal=key={key}")
        return key

    def _secret(self, name: str, *content: str) -> None:
        self.plane.kubectl("-n", NAMESPACE, "create", "secret", "generic", name, *content)

    def deployment(self, name: str) -> Any:
        """The object. Raises RuntimeError."""
        return self.plane.get("-n", NAMESPACE, "deployment", name)

    def pods(self, name: str) -> list[Any]:
        """Of a Deployment, those that are ending among them."""
        found = self.plane.get("-n", NAMESPACE, "pods", "-l", f"app.kubernetes.io/name={name}")["items"]
        return sorted(found, key=lambda pod: str(pod["metadata"]["creationTimestamp"]))

    def ready_pods(self, name: str) -> list[str]:
        """Names of those that are ready and not ending."""
        return [pod["metadata"]["name"] for pod in self.pods(name) if is_ready(pod)]

    def waiting(self, name: str) -> set[str]:
        """Why containers of a Deployment's pods wait."""
        statuses = [status for pod in self.pods(name) for status in pod["status"].get("containerStatuses", ())]
        return {status["state"]["waiting"]["reason"] for status in statuses if "waiting" in status["state"]}

    def problems(self, name: str) -> set[str]:
        """What containers of a Deployment's pods wait for, in words."""
        statuses = [status for pod in self.pods(name) for status in pod["status"].get("containerStatuses", ())]
        return {status["state"]["waiting"].get("message", "") for status in statuses if "waiting" in status["state"]} - {""}

    def scale(self, name: str, replicas: int) -> None:
        """What a person does."""
        self.plane.kubectl("-n", NAMESPACE, "scale", f"deployment/{name}", f"--replicas={replicas}")

    def replicas(self, name: str) -> int:
        """That a Deployment is to have."""
        return int(self.deployment(name)["spec"]["replicas"])

    def wait_rolled_out(self, name: str, timeout_s: float = 180) -> None:
        """`kubectl rollout status`. Raises RuntimeError with the pods' states and logs."""
        try:
            flags = (f"deployment/{name}", f"--timeout={timeout_s:.0f}s")
            self.plane.kubectl("-n", NAMESPACE, "rollout", "status", *flags, timeout_s=timeout_s + 30)
        except RuntimeError as error:
            raise RuntimeError(f"{error}\n{self.report()}") from None

    def wait_for(self, condition: Callable[[], object], what: str, timeout_s: float = 60) -> None:
        """Until it is true. Raises AssertionError with the pods' states and logs."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, f"waited {timeout_s:.0f} s for {what}\n{self.report()}"
            time.sleep(_POLL_S)

    def report(self) -> str:
        """For a failure: the pods, and the end of what the agent and the containers said that spoke last."""
        lines = [self.plane.kubectl("-n", NAMESPACE, "get", "pods", "-o", "wide", check=False)]
        logs = sorted((self._folder / "pods").glob("*/*.log"), key=lambda log: log.stat().st_mtime)
        for log in [*logs[-12:], self._folder / "agent.log"]:
            tail = log.read_text(encoding="utf-8", errors="replace").splitlines()[-8:]
            lines.append("\n".join((f"--- {log.parent.name}/{log.name}", *tail)))
        return "\n".join(lines)

    def signal(self, pod: str, container: str, number: signal.Signals) -> None:
        """To a container's first program: SIGKILL is as when memory runs out, SIGSTOP as when it hangs."""
        (path,) = (self._folder / "pods").glob(f"*_{pod}_*/{container}.pid")
        os.kill(int(path.read_text(encoding="ascii")), number)

    def num_restarts(self, name: str) -> int:
        """Of all containers that a Deployment has now."""
        return sum(status["restartCount"] for pod in self.pods(name) for status in pod["status"].get("containerStatuses", ()))

    def logs(self, pod: str, container: str) -> str:
        """What a container has said so far."""
        found = (self._folder / "pods").glob(f"*_{pod}_*/{container}.log")
        return "".join(path.read_text(encoding="utf-8", errors="replace") for path in found)


def is_ready(pod: Any) -> bool:
    """Whether it takes work and is not about to go."""
    conditions = pod["status"].get("conditions", ())
    return "deletionTimestamp" not in pod["metadata"] and any(
        condition["type"] == "Ready" and condition["status"] == "True" for condition in conditions
    )
