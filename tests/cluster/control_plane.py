"""A control plane of one process each: etcd, API server, controllers, scheduler. RBAC, admission and aggregation are on.

    with ControlPlane(programs, folder) as plane:
        plane.kubectl("get", "nodes")

Runs in the network that `network.enter` has made. What each program says stands in `folder`/NAME.log.
"""

from __future__ import annotations

import json
import os
import secrets
import signal as signals
import ssl
import subprocess
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from pdmesh.platform import parent_death
from pdmesh.runtime.rpc.certificates import make_ca, sign
from tests.cluster import network

URL = f"https://{network.GATEWAY}:{network.API_PORT}"
USERS = {
    "admin": "system:masters",
    "system:kube-controller-manager": "",
    "system:kube-scheduler": "",
    "node-agent": "system:masters",
}
START_TIMEOUT_S = 90.0
_POLL_PERIOD_S = 0.2
# On by itself since 1.21: without it the server drops a Job's ttlSecondsAfterFinished.
_GATES = "TTLAfterFinished=true"


class ControlPlane:
    """Started and stopped as a context manager; each program can be signalled and started again."""

    def __init__(self, programs: Path, folder: Path) -> None:
        """`programs`: from `build`. `folder` is empty and only this cluster's."""
        self._programs = programs
        self._folder = folder
        self._tokens = {user: secrets.token_hex(16) for user in USERS}
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._commands: dict[str, list[str]] = {}

    @property
    def ca(self) -> Path:
        """Who vouches for the API server."""
        return self._folder / "ca.crt"

    @property
    def folder(self) -> Path:
        """Certificates, data, logs."""
        return self._folder

    def token(self, user: str) -> str:
        """With which one of `USERS` calls."""
        return self._tokens[user]

    def __enter__(self) -> Self:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._make_certificates()
        self._make_configurations()
        self._commands = self._make_commands()
        try:
            self.start("etcd")
            self.start("kube-apiserver")
            self.wait_ready()
            self.start("kube-controller-manager")
            self.start("kube-scheduler")
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()

    @property
    def pids(self) -> list[int]:
        """Of what runs."""
        return [process.pid for process in self._processes.values() if process.poll() is None]

    def start(self, name: str) -> None:
        """Starts one program; what it says is added to its log."""
        with (self._folder / f"{name}.log").open("ab") as log:
            command = parent_death.tied(self._commands[name]).argv
            self._processes[name] = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)

    def signal(self, name: str, number: signals.Signals) -> None:
        """Sends one a signal."""
        self._processes[name].send_signal(number)

    def end(self, name: str, number: signals.Signals = signals.SIGTERM) -> None:
        """Ends one, at the latest after ten seconds."""
        process = self._processes[name]
        process.send_signal(number)
        process.send_signal(signals.SIGCONT)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def stop(self) -> None:
        """Ends all, the API server before its store."""
        for name in reversed(list(self._processes)):
            self.end(name)
        self._processes.clear()

    def wait_ready(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Until the API server says that it is. Raises RuntimeError with the end of its log."""
        deadline = time.monotonic() + timeout_s
        while not self._is_ready():
            ended = [name for name, process in self._processes.items() if process.poll() is not None]
            if ended or time.monotonic() > deadline:
                raise RuntimeError(f"the API server is not ready; ended: {ended or 'nothing'}\n{self.log_tail('kube-apiserver')}")
            time.sleep(_POLL_PERIOD_S)

    def log_tail(self, name: str, lines: int = 20) -> str:
        """The last that a program said."""
        text = (self._folder / f"{name}.log").read_text(encoding="utf-8", errors="replace")
        return "\n".join(text.splitlines()[-lines:])

    def _is_ready(self) -> bool:
        request = urllib.request.Request(f"{URL}/readyz", headers={"Authorization": f"Bearer {self._tokens['admin']}"})
        try:
            with urllib.request.urlopen(request, timeout=2, context=ssl.create_default_context(cafile=str(self.ca))) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def kubectl(self, *arguments: str, stdin: str | None = None, check: bool = True, timeout_s: float = 120) -> str:
        """What kubectl of the same version prints, as admin. Raises RuntimeError with its stderr, unless `check` is off."""
        command = [str(self._programs / "kubectl"), f"--kubeconfig={self.kubeconfig('admin')}", *arguments]
        environment = {**os.environ, "HOME": str(self._folder)}  # where its cache of what the server knows goes
        done = subprocess.run(
            command, input=stdin, env=environment, capture_output=True, text=True, timeout=timeout_s, check=False
        )
        if check and done.returncode != 0:
            raise RuntimeError(f"kubectl {' '.join(arguments)}: {done.stderr.strip() or done.stdout.strip()}")
        return done.stdout if done.returncode == 0 else done.stdout + done.stderr

    def get(self, *arguments: str) -> Any:
        """What `kubectl get … -o json` prints. Raises RuntimeError."""
        return json.loads(self.kubectl("get", *arguments, "-o", "json"))

    def kubeconfig(self, user: str) -> Path:
        """A file with which one of `USERS` calls."""
        return self._folder / f"{user.replace(':', '-')}.kubeconfig"

    def _make_certificates(self) -> None:
        ca = make_ca(self._folder / "ca")
        names = ("kubernetes.default.svc", network.GATEWAY, network.API_SERVICE, "127.0.0.1")
        sign(ca, self._folder / "apiserver", name="kubernetes", more=names)
        # Who calls aggregated servers in the name of others is known by a CA of its own.
        front = make_ca(self._folder / "front-ca")
        sign(front, self._folder / "front", name="front-proxy")
        key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
        pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        _write_private(self._folder / "sa.key", pem.decode())

    def _make_configurations(self) -> None:
        rows = (f'{token},{user},{user},"{USERS[user]}"' for user, token in self._tokens.items())
        _write_private(self._folder / "tokens.csv", "\n".join(rows) + "\n")
        for user, token in self._tokens.items():
            _write_private(self.kubeconfig(user), json.dumps(kubeconfig(self.ca, token)))

    def _make_commands(self) -> dict[str, list[str]]:
        made = {
            "etcd": self._etcd(),
            "kube-apiserver": self._api_server(),
            "kube-controller-manager": self._controllers(),
            "kube-scheduler": self._scheduler(),
        }
        return {name: [str(self._programs / name), *flags] for name, flags in made.items()}

    def _etcd(self) -> list[str]:
        url = f"http://127.0.0.1:{network.ETCD_PORT}"
        peers = "http://127.0.0.1:2380"
        flags = {"listen-client-urls": url, "advertise-client-urls": url, "listen-peer-urls": peers}
        flags |= {"initial-advertise-peer-urls": peers, "initial-cluster": f"default={peers}"}
        # Nothing here outlives the test: a disk that is slow for a moment need not make a leader step down.
        return _flags({**flags, "data-dir": str(self._folder / "etcd"), "heartbeat-interval": "500", "election-timeout": "5000"})

    def _api_server(self) -> list[str]:
        key = str(self._folder / "sa.key")
        return _flags(
            {
                "etcd-servers": f"http://127.0.0.1:{network.ETCD_PORT}",
                "bind-address": "0.0.0.0",
                "advertise-address": network.GATEWAY,
                "secure-port": str(network.API_PORT),
                "service-cluster-ip-range": network.SERVICE_RANGE,
                "tls-cert-file": str(self._folder / "apiserver.crt"),
                "tls-private-key-file": str(self._folder / "apiserver.key"),
                "token-auth-file": str(self._folder / "tokens.csv"),
                "authorization-mode": "RBAC",
                "anonymous-auth": "false",
                "service-account-issuer": "https://kubernetes.default.svc",
                "service-account-key-file": key,
                "service-account-signing-key-file": key,
                "requestheader-client-ca-file": str(self._folder / "front-ca.crt"),
                "requestheader-allowed-names": "front-proxy",
                "requestheader-username-headers": "X-Remote-User",
                "requestheader-group-headers": "X-Remote-Group",
                "requestheader-extra-headers-prefix": "X-Remote-Extra-",
                "proxy-client-cert-file": str(self._folder / "front.crt"),
                "proxy-client-key-file": str(self._folder / "front.key"),
                # Aggregated servers are called at their pods' addresses, as where the API server has no proxy beside it.
                "enable-aggregator-routing": "true",
                "feature-gates": _GATES,
            }
        )

    def _controllers(self) -> list[str]:
        return _flags(
            {
                "kubeconfig": str(self.kubeconfig("system:kube-controller-manager")),
                "use-service-account-credentials": "true",
                "service-account-private-key-file": str(self._folder / "sa.key"),
                "root-ca-file": str(self.ca),
                "leader-elect": "false",
                # A machine that was stopped for a measurement is no node that is lost.
                "node-monitor-grace-period": "120s",
                # The defaults (15 s, 5 min) are made for days, not for minutes.
                "horizontal-pod-autoscaler-sync-period": "2s",
                "horizontal-pod-autoscaler-downscale-stabilization": "10s",
                "concurrent-gc-syncs": "5",
                "port": "0",
                "feature-gates": _GATES,
            }
        )

    def _scheduler(self) -> list[str]:
        kubeconfig = str(self.kubeconfig("system:kube-scheduler"))
        return _flags({"kubeconfig": kubeconfig, "leader-elect": "false", "port": "0"})


def kubeconfig(ca: Path, token: str) -> dict[str, Any]:
    """For kubectl and others, as JSON, which is YAML."""
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "test", "cluster": {"server": URL, "certificate-authority": str(ca)}}],
        "users": [{"name": "user", "user": {"token": token}}],
        "contexts": [{"name": "test", "context": {"cluster": "test", "user": "user"}}],
        "current-context": "test",
    }


def _flags(values: dict[str, str]) -> list[str]:
    return [f"--{name}={value}" for name, value in values.items()]


def _write_private(path: Path, text: str) -> None:
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
        file.write(text)


def ended(pids: Sequence[int], timeout_s: float = 10) -> bool:
    """Whether all are gone, or go in time."""
    deadline = time.monotonic() + timeout_s
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_PERIOD_S)
    return True
