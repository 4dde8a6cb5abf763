"""A stand-in for a model server: it answers with its name, and its /metrics say what the test sets. An instrument."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field


@dataclass
class ModelServer:
    """One server at `address`. `bodies`: of the POSTs that came; `delay_s` before it answers one; `metrics` None: 404."""

    address: str = ""
    metrics: str | None = "vllm:num_requests_running 0\n"
    delay_s: float = 0.0
    bodies: list[bytes] = field(default_factory=list)
    num_readings: int = 0
    is_leaving: bool = False
    status: str = "200 OK"
    is_silent: bool = False

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the requests of one connection."""
        try:
            while await self._answer(reader, writer):
                pass
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        length = next((int(line.split(":")[1]) for line in head.splitlines() if line.lower().startswith("content-length")), 0)
        body = await _chunked(reader) if "transfer-encoding: chunked" in head.lower() else await reader.readexactly(length)
        if self.is_silent:
            await asyncio.sleep(3600)
        if head.startswith("GET"):
            self.num_readings += 1
            status, answer = ("404 Not Found", b"") if self.metrics is None else (self.status, self.metrics.encode())
            status = "503 Service Unavailable" if self.is_leaving else status
        else:
            self.bodies.append(body)
            await asyncio.sleep(self.delay_s)
            status, answer = "200 OK", json.dumps({"server": self.address}).encode()
        writer.write(f"HTTP/1.1 {status}\r\ncontent-length: {len(answer)}\r\n\r\n".encode() + answer)
        await writer.drain()
        return "HTTP/1.1" in head.splitlines()[0]


async def _chunked(reader: asyncio.StreamReader) -> bytes:
    body = b""
    while size := int(await reader.readline(), 16):
        body += await reader.readexactly(size)
        await reader.readline()
    await reader.readline()
    return body


@asynccontextmanager
async def running_server() -> AsyncIterator[tuple[ModelServer, Callable[[], None]]]:
    """A server, and what ends it early."""
    server = ModelServer()
    listening = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    server.address = f"127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    try:
        yield server, listening.close
    finally:
        listening.close()
