"""The autoscaler in the cluster: deployed from its manifests, quicker than for production; who leads, what it did and why."""

from __future__ import annotations

import json
import re
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from tests.cluster.cluster import NAMESPACE, Cluster
from tests.k8s.kustomize import FOLDER, Manifest, containers_of, name_of, render

NAME = "pdmesh-autoscaler"
SWITCH, HOLD_UNTIL = "pdmesh.io/autoscale", "pdmesh.io/hold-until"
DECODE, PREFILL = "pdmesh-decode", "pdmesh-prefill"
TTFT_MS = 1500
OBJECTIVES = f"""[smollm2]
ttft_ms = {TTFT_MS}
tpot_ms = 400
quantile = 0.9
"""
"""Of two processors that everything shares: what they keep with some of the workers, and not with one."""
WORKER_SETTINGS = {"PDMESH_MAX_NUM_SEQS": "4"}
"""So few sequences at once that a load that this machine bears needs several decode workers; and so many that one of them bears
who asks seldom (`load.SELDOM_S`), also where other work has made its steps three times as long."""
COOL_DOWN_S = 8
START_S = 6
MAX_DECODE = 4
SETTINGS = {
    "PDMESH_PERIOD_S": "1",
    "PDMESH_WINDOW_S": "6",
    "PDMESH_COOL_DOWN_S": str(COOL_DOWN_S),
    "PDMESH_STALE_AFTER_S": "8",
    "PDMESH_DRAIN_S": "20",
    "PDMESH_FLIPS": "false",
    "PDMESH_DECODE_START_S": str(START_S),
    "PDMESH_DECODE_MAX_REPLICAS": str(MAX_DECODE),
    "PDMESH_PREFILL_MAX_REPLICAS": "1",
    "PDMESH_KUBERNETES_LEASE_DURATION_S": "8",
    "PDMESH_KUBERNETES_RENEW_DEADLINE_S": "4",
    "PDMESH_KUBERNETES_RETRY_PERIOD_S": "1",
    "PDMESH_KUBERNETES_REQUEST_TIMEOUT_S": "3",
}


@dataclass(frozen=True)
class Autoscaler:
    """As people see it: by the API."""

    cluster: Cluster

    def begin(self) -> None:
        """The pools are left to it, and its decode workers are small; somebody leads."""
        plane = self.cluster.plane
        settings = [f"{name}={value}" for name, value in WORKER_SETTINGS.items()]
        plane.kubectl("-n", NAMESPACE, "set", "env", f"deployment/{DECODE}", *settings)
        for name in (DECODE, NAME):
            self.cluster.wait_rolled_out(name)
        self.cluster.wait_for(lambda: self.leader() in self.cluster.ready_pods(NAME), "a leader")
        plane.kubectl("-n", NAMESPACE, "annotate", "deployment", DECODE, PREFILL, f"{SWITCH}-")

    def wait_until_small(self, *deployments: str) -> None:
        """Nobody asks for anything: one worker of each."""
        for name in deployments:
            self.cluster.wait_for(partial(self._is_small, name), f"one worker of {name}", timeout_s=150)

    def _is_small(self, name: str) -> bool:
        return len(self.cluster.pods(name)) == 1 == self.cluster.replicas(name)

    @contextmanager
    def told(self, settings: Mapping[str, str]) -> Iterator[None]:
        """Other settings than SETTINGS, while inside."""
        self._tell(settings)
        try:
            yield
        finally:
            self._tell({name: SETTINGS[name] for name in settings})

    def _tell(self, settings: Mapping[str, str]) -> None:
        words = [f"{name}={value}" for name, value in settings.items()]
        self.cluster.plane.kubectl("-n", NAMESPACE, "set", "env", f"deployment/{NAME}", *words)
        self.cluster.wait_rolled_out(NAME)
        self.cluster.wait_for(lambda: self.leader() in self.cluster.ready_pods(NAME), "a leader")

    def hold(self, *deployments: str) -> None:
        """Their replicas are a person's from now on."""
        self.cluster.plane.kubectl("-n", NAMESPACE, "annotate", "--overwrite", "deployment", *deployments, f"{SWITCH}=off")

    def release(self, *deployments: str) -> None:
        """All at the same moment for the leader, which hangs meanwhile, for less than it may: what a person has set before is of
        no account."""
        leader = self.leader()
        assert leader is not None
        past = f"{HOLD_UNTIL}={time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())}"
        self.cluster.signal(leader, "autoscaler", signal.SIGSTOP)
        try:
            words = ("deployment", *deployments, f"{SWITCH}-", past)
            self.cluster.plane.kubectl("-n", NAMESPACE, "annotate", "--overwrite", *words)
        finally:
            self.cluster.signal(leader, "autoscaler", signal.SIGCONT)

    def leader(self) -> str | None:
        """The pod that holds the Lease; None: nobody does."""
        leases = self.cluster.plane.get("-n", NAMESPACE, "leases")["items"]
        holders = [lease["spec"].get("holderIdentity") or "" for lease in leases if lease["metadata"]["name"] == NAME]
        return holders[0].rpartition("_")[0] or holders[0] if holders and holders[0] else None

    def renewed(self) -> str:
        """When the Lease was renewed last, as the API writes times."""
        return str(self.cluster.plane.get("-n", NAMESPACE, "lease", NAME)["spec"]["renewTime"])

    def events(self, deployment: str) -> list[tuple[str, str]]:
        """Reason and note of what was done to a Deployment by the autoscaler, oldest first."""
        found = self.cluster.plane.get("-n", NAMESPACE, "events.v1.events.k8s.io")["items"]
        ours = [
            event for event in found if event["regarding"].get("name") == deployment and "deployment-controller" not in _by(event)
        ]
        return [(event["reason"], event.get("note", "")) for event in sorted(ours, key=_time)]

    def num_events(self, deployment: str, reason: str) -> int:
        """Of one reason; one that the API has counted several times counts once."""
        return sum(each == reason for each, _ in self.events(deployment))

    def scaled_for_load(self, deployment: str) -> set[str]:
        """ScaledUp, ScaledDown: what was done for the requests that come, or that wait, or because fewer replicas are enough."""
        whys = ("requests/s", "requests wait", "enough")
        return {reason for reason, note in self.events(deployment) if any(why in note for why in whys)}

    def logs(self) -> str:
        """What all candidates have said so far, those that are gone among them. Asks nobody."""
        return self.cluster.logs(f"{NAME}-*", "autoscaler")

    def num_holds(self, why: str) -> int:
        """How often it has said that it holds for this reason. Asks nobody."""
        return sum(" hold: " in line and why in line for line in self.logs().splitlines())

    def lent(self, giver: str, taker: str) -> list[str]:
        """Workers that were given the other role, by name. Asks nobody."""
        lines = re.findall(rf" flip: \d+ of {giver} become {taker} \(([^)]*)\)", self.logs())
        return [name for line in lines for name in line.split(", ")]

    def num_changes(self) -> int:
        """How often it has set replicas. Asks nobody."""
        return self.logs().count(" scale: ")


def tuned(folder: str = "overlays/cpu") -> list[Manifest]:
    """A mesh with the settings above in the autoscaler, and objectives for two processors that all of it shares."""
    found = {name_of(manifest): manifest for manifest in render(FOLDER / folder)}
    _set(found["Deployment", NAME], SETTINGS)
    found["ConfigMap", "pdmesh-objectives"]["data"] = {"objectives.toml": OBJECTIVES}
    return list(found.values())


def _set(manifest: Manifest, settings: Mapping[str, str]) -> None:
    for container in containers_of(manifest):
        kept = [entry for entry in container.get("env", ()) if entry["name"] not in settings]
        container["env"] = [*kept, *({"name": name, "value": value} for name, value in settings.items())]


def secret_of(cluster: Cluster, name: str) -> Manifest:
    """A Secret as it can be made again."""
    found = cluster.plane.get("-n", NAMESPACE, "secret", name)
    metadata = {"name": name, "namespace": NAMESPACE}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "data": found["data"], "type": found["type"]}


def _by(event: Any) -> str:
    return json.dumps([event.get("reportingController"), event.get("deprecatedSource")])


def _time(event: Any) -> str:
    return str(event.get("eventTime") or event["metadata"]["creationTimestamp"])
