"""Runs an example as a process of its own."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 60


@asynccontextmanager
async def started(*command: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """A process in the root of the checkout; it is gone at the end."""
    pipe = asyncio.subprocess.PIPE
    env = {**os.environ, "GRPC_VERBOSITY": "NONE"}  # gRPC tells of lost routers in lines of its own
    process = await asyncio.create_subprocess_exec(*command, cwd=ROOT, env=env, stdout=pipe, stderr=pipe)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


def example(name: str) -> tuple[str, ...]:
    """How it is started."""
    return (sys.executable, "-m", f"examples.{name}")


async def output_of(*command: str) -> str:
    """What it prints; it has to succeed and to print no error."""
    async with started(*command) as process:
        out, err = await asyncio.wait_for(process.communicate(), TIMEOUT_S)
        assert (process.returncode, err.decode()) == (0, ""), out.decode()
        return out.decode()
