"""Model servers as far as a picker sees them: many ports of one process, each with metrics of vLLM's size. They do no more.

    python -m benchmarks.kubernetes.model_servers 64

The first line out is JSON with their addresses; it ends with its input.
"""

from __future__ import annotations

import asyncio
import json
import sys
from contextlib import suppress

NUM_OTHER_LINES = 700
"""A server of vLLM 0.32 with one model sends about so many, histograms' buckets for the most part (55 KB)."""


def page(number: int) -> bytes:
    lines = [
        f'vllm:num_requests_running{{engine="0",model_name="m"}} {number % 5}.0',
        'vllm:num_requests_waiting{engine="0",model_name="m"} 0.0',
        f'vllm:kv_cache_usage_perc{{engine="0",model_name="m"}} {0.01 * (number % 40)}',
        'vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="20000"} 1.0',
    ]
    lines += [
        f'vllm:some_histogram_seconds_bucket{{engine="0",le="{each / 10}",model_name="m"}} {each}.0'
        for each in range(NUM_OTHER_LINES)
    ]
    body = ("\n".join(lines) + "\n").encode()
    return f"HTTP/1.1 200 OK\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body


async def serve(count: int) -> None:
    servers, addresses = [], []
    for number in range(count):
        answer = page(number)

        async def answered(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, answer: bytes = answer) -> None:
            with suppress(asyncio.IncompleteReadError, ConnectionError):  # until the picker closes it
                while await reader.readuntil(b"\r\n\r\n"):
                    writer.write(answer)
                    await writer.drain()
            writer.close()

        server = await asyncio.start_server(answered, "127.0.0.1", 0)
        servers.append(server)
        addresses.append(f"127.0.0.1:{server.sockets[0].getsockname()[1]}")
    print(json.dumps({"addresses": addresses}), flush=True)
    await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1])))
