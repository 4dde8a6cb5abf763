"""Certificates and CAs that are replaced while external metrics are served, over real TLS."""

from __future__ import annotations

import asyncio
import shutil
import socket
import ssl
from pathlib import Path

import pytest

from pdmesh.autoscaler.kubernetes import metrics_server
from pdmesh.runtime.rpc.certificates import make_certificates
from tests.autoscaler.kubernetes.api_server import ApiServer
from tests.autoscaler.kubernetes.metrics_asked import BASE, DECISION, METRIC, Asked, answered_soon
from tests.support.waiting import eventually


async def test_a_new_ca_is_trusted_and_the_old_one_is_not_without_a_restart(
    server: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(metrics_server, "RELOAD_S", 0.05)
    asked, rotated = Asked(server, tmp_path), make_certificates(tmp_path / "rotated", days=30)
    await asked.server.start()
    try:
        asked.server.on_decision(DECISION, 0.0)
        assert (await asked.get(METRIC))[0] == 200
        old, asked.shown = asked.shown, rotated
        with pytest.raises(OSError):
            await asked.get(METRIC)
        asked.name_ca(rotated.tls_ca)
        assert await answered_soon(asked) == 200
        asked.shown = old
        with pytest.raises(OSError):
            await asked.get(METRIC)
        asked.shown = rotated
        server.stop()
        await eventually(lambda: any("stays as it was opened" in message for message in caplog.messages))
        assert (await asked.get(METRIC))[0] == 200, "an API server that is down takes nothing away"
    finally:
        await asked.server.close()


async def test_nor_is_the_old_one_by_a_handshake_that_began_before(
    server: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics_server, "RELOAD_S", 0.05)
    asked, rotated = Asked(server, tmp_path), make_certificates(tmp_path / "rotated", days=30)
    await asked.server.start()
    try:
        assert (await asked.get(BASE))[0] == 200
        with socket.create_connection(("127.0.0.1", asked.server.ports["kubernetes"]), timeout=5) as early:
            assert (await asked.get(BASE))[0] == 200  # so it was taken as well
            context, asked.shown = asked.context(), rotated
            asked.name_ca(rotated.tls_ca)
            assert await answered_soon(asked, BASE) == 200
            assert await asyncio.to_thread(_answer_of, early, context) == b""
    finally:
        await asked.server.close()


def _answer_of(connected: socket.socket, context: ssl.SSLContext) -> bytes:
    """Nothing where the connection ends without one."""
    try:
        with context.wrap_socket(connected) as secured:
            secured.sendall(f"GET {BASE} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
            return secured.recv(100)
    except OSError:
        return b""


async def test_a_new_certificate_is_shown_without_a_restart(
    server: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(metrics_server, "RELOAD_S", 0.05)
    asked, renewed = Asked(server, tmp_path), make_certificates(tmp_path / "renewed", days=30)
    await asked.server.start()
    try:
        asked.server.on_decision(DECISION, 0.0)
        shutil.copy(renewed.tls_cert, asked.cert)
        await eventually(lambda: any("certificate or key cannot be used" in message for message in caplog.messages))
        assert (await asked.get(METRIC))[0] == 200, "without the key that fits it, it is not taken"
        shutil.copy(renewed.tls_key, asked.key)
        asked.ca = renewed.tls_ca
        assert await answered_soon(asked) == 200
    finally:
        await asked.server.close()
