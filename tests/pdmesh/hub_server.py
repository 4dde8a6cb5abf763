"""A hub as small as can be: the API that huggingface_hub speaks, for a few repositories of this test, over a real socket."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "a1" * 20


@dataclass
class Hub:
    """Repositories by name: their files by path. `seen`: requests, as METHOD PATH; `refuse`: a status for every request."""

    repositories: dict[str, dict[str, bytes]]
    gated: frozenset[str] = frozenset()
    refuse: int = 0
    seen: list[str] = field(default_factory=list)
    url: str = ""

    @property
    def fetched(self) -> set[str]:
        """The files whose content was sent."""
        return {request.rpartition("/")[2] for request in self.seen if request.startswith("GET") and "/resolve/" in request}


@contextmanager
def running(hub: Hub) -> Iterator[Hub]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            _answer(hub, self)

        def do_HEAD(self) -> None:
            _answer(hub, self)

        def log_message(self, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _answer(hub: Hub, handler: BaseHTTPRequestHandler) -> None:
    path = unquote(urlsplit(handler.path).path)
    hub.seen.append(f"{handler.command} {path}")
    api = re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/(revision|tree)/([^/]+))?", path)
    file = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
    repository = (api or file or [None, ""])[1]
    if hub.refuse:
        _send(handler, hub.refuse, b"{}", {})
    elif repository not in hub.repositories:
        _send(handler, 401, b"{}", {"X-Error-Code": "RepoNotFound"})
    elif repository in hub.gated:
        _send(handler, 403, b"{}", {"X-Error-Code": "GatedRepo", "X-Error-Message": "gated"})
    elif api is not None:
        _send_info(hub.repositories[repository], handler, repository, api)
    else:
        assert file is not None
        content = hub.repositories[repository].get(file[3])
        headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{hashlib.sha256(content or b"").hexdigest()}"'}
        known = content is not None
        _send(handler, 200 if known else 404, content or b"", headers if known else {"X-Error-Code": "EntryNotFound"})


def _send_info(files: dict[str, bytes], handler: BaseHTTPRequestHandler, repository: str, api: re.Match[str]) -> None:
    if api[3] not in (None, "main", "v1", COMMIT):
        _send(handler, 404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        return
    if api[2] == "tree":
        entries: Any = [{"type": "file", "path": n, "size": len(c), "oid": hashlib.sha1(c).hexdigest()} for n, c in files.items()]
    else:
        siblings = [{"rfilename": name, "size": len(content)} for name, content in files.items()]
        entries = {"id": repository, "sha": COMMIT, "siblings": siblings, "tags": ["license:apache-2.0"], "private": False}
    _send(handler, 200, json.dumps(entries).encode(), {"Content-Type": "application/json"})


def _send(handler: BaseHTTPRequestHandler, status: int, content: bytes, headers: dict[str, str]) -> None:
    handler.send_response(status)
    for name, value in {"Content-Length": str(len(content)), **headers}.items():
        handler.send_header(name, value)
    handler.end_headers()
    if handler.command == "GET":
        handler.wfile.write(content)
