"""What the images' programs do: each shows its help as the image's user, and all together answer a request."""

from __future__ import annotations

import json
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.cluster.images.build import Builder
from tests.cluster.images.chroots import Layer, inside, mounted

HELPS: dict[str, tuple[list[str], ...]] = {
    "router": (["python", "-m", "router", "--help"], ["pdmesh", "--help"], ["pdmesh", "loadtest", "--help"]),
    "autoscaler": (["python", "-m", "pdmesh.autoscaler", "--help"],),
    "worker-cpu": (["python", "-m", "pdmesh.worker", "--help"], ["python", "-m", "decode_service", "--help"]),
}
_IS_SMALL = "import importlib.util as u, os; print(u.find_spec('torch') is None and os.getuid() == 10001)"
START_S = 120.0
_MODEL = "/models/m"


def seen(target: str, layer: Layer) -> dict[str, object]:
    """Of one image: whether its programs start as its user; whether torch is there only where it is needed."""
    with mounted(layer) as root:
        helps = [_printed(root, layer, command) for command in HELPS[target]]
        is_small = _printed(root, layer, ["python", "-c", _IS_SMALL]).strip() == "True"
        return {
            "starts": all("usage" in text.lower() for text in helps),
            "torch_as_expected": is_small == (target != "worker-cpu"),
            "user": _printed(root, layer, ["id", "-u"]).strip(),
            "compiler": "none" if "none" in _printed(root, layer, ["sh", "-c", "command -v g++ || echo none"]) else "",
        }


def together(builder: Builder, model: Path) -> dict[str, object]:
    """A worker, a router and an autoscaler (dry run), each of its image: what the router answers, how the autoscaler is.

    Raises RuntimeError."""
    ports = [_free_port() for _ in range(4)]
    with ExitStack() as stack:
        started = _Started(stack, builder, model)
        started.start("worker-cpu", "worker", f"--model={_MODEL}", "--model-name=m", f"--port={ports[0]}", "--kv-memory-mb=256")
        started.wait_serving(ports[0])
        started.start(
            "router", "router", f"--models=m={_MODEL}", f"--workers=127.0.0.1:{ports[0]}", f"--port={ports[1]}",
            f"--http-port={ports[2]}",
        )  # fmt: skip
        answer = started.ask(
            f"http://127.0.0.1:{ports[2]}/v1/completions", {"model": "m", "prompt": "One, two,", "max_tokens": 8}
        )
        objectives = builder.build("autoscaler").upper / "tmp/objectives.toml"
        objectives.parent.mkdir(mode=0o1777, exist_ok=True)
        objectives.write_text("[m]\nttft_ms = 1000\ntpot_ms = 100\nquantile = 0.99\n")
        started.start(
            "autoscaler",
            "autoscaler",
            f"--routers=127.0.0.1:{ports[1]}",
            "--objectives=/tmp/objectives.toml",
            f"--port={ports[3]}",
        )
        started.wait_serving(ports[3])
        return {"answer": answer["choices"][0]["text"], "usage": answer["usage"]["completion_tokens"], "autoscaler": "serving"}


class _Started:
    """Processes in the images; ended with the stack."""

    def __init__(self, stack: ExitStack, builder: Builder, model: Path) -> None:
        self._stack, self._builder, self._model = stack, builder, model
        self._processes: list[tuple[str, subprocess.Popen[bytes]]] = []

    def start(self, target: str, *arguments: str) -> None:
        """`python -m arguments…` in an image."""
        layer = self._builder.build(target)
        root = self._stack.enter_context(mounted(layer, {self._model: _MODEL}))
        process = subprocess.Popen(inside(root, layer, ["python", "-m", *arguments]), stdout=subprocess.DEVNULL)
        self._processes.append((target, process))
        self._stack.callback(_end, process)

    def wait_serving(self, port: int) -> None:
        """By gRPC's health."""
        until = time.monotonic() + START_S
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            health = health_pb2_grpc.HealthStub(channel)
            while time.monotonic() < until:
                self._check()
                try:
                    answer = health.Check(health_pb2.HealthCheckRequest(), timeout=2.0)
                except grpc.RpcError:
                    answer = None
                if answer is not None and answer.status == health_pb2.HealthCheckResponse.SERVING:
                    return
                time.sleep(0.3)
        raise RuntimeError(f"nobody serves on port {port} after {START_S:g} s")

    def ask(self, url: str, body: object) -> Any:
        """Once the router has a worker."""
        until = time.monotonic() + START_S
        while True:
            self._check()
            request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
            try:
                with urllib.request.urlopen(request, timeout=30) as answer:
                    return json.load(answer)
            except (urllib.error.URLError, OSError) as error:
                if time.monotonic() > until:
                    raise RuntimeError(f"{url}: {error}") from error
            time.sleep(0.3)

    def _check(self) -> None:
        for target, process in self._processes:
            if process.poll() is not None:
                raise RuntimeError(f"{target} has ended with exit code {process.returncode}")


def _printed(root: Path, layer: Layer, command: Sequence[str]) -> str:
    done = subprocess.run(inside(root, layer, command), capture_output=True, text=True, timeout=120, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: exit code {done.returncode}\n{done.stderr[-2000:]}")
    return done.stdout


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(5)


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])
