"""The router of the benchmark: as `python -m router`, and each completed request's own timings go to a file, a line of JSON each.

Whatever protocol a request came by, it passes the frontend: this is the mesh's side of every figure.
"""

from __future__ import annotations

import json
import os
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path
from unittest.mock import patch

from pdmesh.v1 import mesh_pb2
from router import main
from router.api.frontend import Frontend, RequestMetadata

FILE_VARIABLE = "BENCH_CLIENTS_RECORDS"


class RecordingFrontend(Frontend):
    """Writes down what `completed` says."""

    def generate(
        self,
        request: mesh_pb2.GenerateRequest,
        time_left_s: float | None,
        received_ns: int | None = None,
        metadata: RequestMetadata | None = None,
    ) -> AsyncGenerator[mesh_pb2.GenerateResponse, None]:
        return _recorded(super().generate(request, time_left_s, received_ns, metadata))

    def chat(
        self,
        request: mesh_pb2.ChatRequest,
        time_left_s: float | None,
        received_ns: int | None = None,
        metadata: RequestMetadata | None = None,
    ) -> AsyncGenerator[mesh_pb2.GenerateResponse, None]:
        return _recorded(super().chat(request, time_left_s, received_ns, metadata))


async def _recorded(
    messages: AsyncGenerator[mesh_pb2.GenerateResponse, None],
) -> AsyncGenerator[mesh_pb2.GenerateResponse, None]:
    async with aclosing(messages):
        async for message in messages:
            if message.WhichOneof("event") == "completed":
                _write(message.completed)
            yield message


def _write(completed: mesh_pb2.Completed) -> None:
    timings, usage = completed.timings, completed.usage
    record = {
        "ttft_s": timings.ttft_ns / 1e9,
        "tpot_s": timings.tpot_ns / 1e9,
        "num_tokens": usage.completion_tokens,
        "mode": mesh_pb2.PrefillMode.Name(timings.mode),
    }
    with Path(os.environ[FILE_VARIABLE]).open("a") as file:
        file.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    with patch.object(main, "Frontend", RecordingFrontend):
        main.main()
