"""As much of an API server as the autoscaler meets, over real HTTP: versions, conflicts, refusals, outages.

It stands in where no real one can run (`make test`); tests/cluster asks the real one the same things.
"""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

Object = dict[str, Any]
NAMESPACE = "mesh"
DEPLOYMENTS = f"/apis/apps/v1/namespaces/{NAMESPACE}/deployments"
LEASES = f"/apis/coordination.k8s.io/v1/namespaces/{NAMESPACE}/leases"
MAPS = f"/api/v1/namespaces/{NAMESPACE}/configmaps"
EVENTS = f"/apis/events.k8s.io/v1/namespaces/{NAMESPACE}/events"


class ApiServer:
    """Objects by path. `refuse`: a status for every request whose "METHOD path" begins so; `slow_s`: before each answer."""

    def __init__(self) -> None:
        self.objects: dict[str, Object] = {}
        self.requests: list[tuple[str, str]] = []
        self.refuse: dict[str, int] = {}
        self.slow_s = 0.0
        self._versions = itertools.count(1)
        self._lock = threading.Lock()
        self._server: ThreadingHTTPServer | None = None
        self.port = 0

    def start(self) -> None:
        """Listens; after a `stop` on the same port."""
        self._server = ThreadingHTTPServer(("127.0.0.1", self.port), _handler(self))
        self._server.daemon_threads = True
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def stop(self) -> None:
        """Nobody answers."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None

    def kubeconfig(self, folder: Path) -> str:
        """Path of a file that leads here."""
        cluster = {"name": "c", "cluster": {"server": f"http://127.0.0.1:{self.port}"}}
        context = {"name": "c", "context": {"cluster": "c", "user": "u"}}
        content = {"clusters": [cluster], "contexts": [context], "users": [{"name": "u", "user": {"token": "t"}}]}
        path = folder / "kubeconfig"
        path.write_text(json.dumps(content | {"current-context": "c", "kind": "Config", "apiVersion": "v1"}))
        return str(path)

    def deployment(self, name: str, replicas: int, **annotations: str) -> None:
        """Made, or made anew."""
        metadata = {"name": name, "uid": f"uid-{next(self._versions)}", "annotations": annotations}
        self.put(f"{DEPLOYMENTS}/{name}", {"metadata": metadata, "spec": {"replicas": replicas}})

    def replicas(self, name: str) -> int:
        """Asked for."""
        return int(self.objects[f"{DEPLOYMENTS}/{name}"]["spec"]["replicas"])

    def person_scales(self, name: str, replicas: int) -> None:
        """`kubectl scale`."""
        found = self.objects[f"{DEPLOYMENTS}/{name}"]
        managed = [{"manager": "kubectl", "fieldsV1": {"f:spec": {"f:replicas": {}}}}]
        self.put(
            f"{DEPLOYMENTS}/{name}", {"metadata": found["metadata"] | {"managedFields": managed}, "spec": {"replicas": replicas}}
        )

    def annotate(self, name: str, **annotations: str | None) -> None:
        """`kubectl annotate --overwrite`; underscores stand for - and the prefix is ours. None takes one away."""
        found = self.objects[f"{DEPLOYMENTS}/{name}"]
        changes = {f"pdmesh.io/{key.replace('_', '-')}": value for key, value in annotations.items()}
        kept = {**found["metadata"].get("annotations", {}), **changes}
        kept = {key: value for key, value in kept.items() if value is not None}
        self.put(f"{DEPLOYMENTS}/{name}", {**found, "metadata": found["metadata"] | {"annotations": kept}})

    def touch(self, name: str) -> None:
        """As its controller does when a pod becomes ready: another version, nothing that matters."""
        self.put(f"{DEPLOYMENTS}/{name}", self.objects[f"{DEPLOYMENTS}/{name}"])

    def put(self, path: str, content: Object) -> Object:
        """In place of what is there."""
        metadata = {**content["metadata"], "resourceVersion": str(next(self._versions))}
        self.objects[path] = {**content, "metadata": metadata}
        return self.objects[path]

    def events(self) -> list[Object]:
        """In their order."""
        return [found for path, found in self.objects.items() if path.startswith(EVENTS)]

    def answer(self, method: str, path: str, body: Object | None) -> tuple[int, Object]:
        """Status and object."""
        time.sleep(self.slow_s)
        with self._lock:
            self.requests.append((method, path))
            for begin, status in self.refuse.items():
                if f"{method} {path}".startswith(begin):
                    return status, _status(status, "refused by the test")
            return {"GET": self._get, "POST": self._post, "PATCH": self._patch}[method](path, body or {})

    def _get(self, path: str, _: Object) -> tuple[int, Object]:
        found = self.objects.get(path)
        return (200, found) if found is not None else (404, _status(404, f"{path} not found"))

    def _post(self, path: str, body: Object) -> tuple[int, Object]:
        key = f"{path}/{body['metadata']['name']}"
        if key in self.objects:
            return 409, _status(409, "already exists")
        return 201, self.put(key, body)

    def _patch(self, path: str, body: Object) -> tuple[int, Object]:
        key = path.removesuffix("/scale")
        found = self.objects.get(key)
        if found is None:
            return 404, _status(404, f"{path} not found")
        version = body.get("metadata", {}).get("resourceVersion")
        if version is not None and version != found["metadata"]["resourceVersion"]:
            return 409, _status(409, "the object has been modified")
        return 200, self.put(key, _merged(found, body))


def _merged(found: Any, patch: Any) -> Any:
    """RFC 7386."""
    if not isinstance(patch, dict):
        return patch
    result = dict(found) if isinstance(found, dict) else {}
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = _merged(result.get(key), value)
    return result


def _status(code: int, message: str) -> Object:
    return {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "message": message, "code": code}


def _handler(server: ApiServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_any(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(length)) if length else None
            status, answer = server.answer(self.command, self.path.partition("?")[0], body)
            data = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            # An outage then takes open connections along, too.
            self.send_header("Connection", "close")
            self.end_headers()
            with suppress(BrokenPipeError):  # whoever asked has stopped waiting
                self.wfile.write(data)
            self.close_connection = True

        do_GET = do_POST = do_PATCH = do_any

        def log_message(self, format: str, *args: object) -> None:
            pass

    return Handler


@contextmanager
def api_server() -> Iterator[ApiServer]:
    """One with both Deployments, each of two replicas."""
    server = ApiServer()
    server.deployment("pdmesh-prefill", 2)
    server.deployment("pdmesh-decode", 2)
    server.start()
    try:
        yield server
    finally:
        server.stop()
