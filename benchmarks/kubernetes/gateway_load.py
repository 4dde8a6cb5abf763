"""A gateway's side of the endpoint picker: HTTP requests as an Envoy tells of them, at a steady rate.

    python -m benchmarks.kubernetes.gateway_load PICKER --rate 200 --seconds 20 --tokens 2000

It writes a line of JSON: how long each choice took, from the end of the body to the endpoint. Requests hold their stream for a
while, as a response does. Messages are made before, so that this process costs little.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from typing import TypeAlias

import grpc.aio

from pdmesh.third_party.envoy import ext_proc_pb2 as pb

METHOD = "/envoy.service.ext_proc.v3.ExternalProcessor/Process"
Process: TypeAlias = "grpc.aio.StreamStreamMultiCallable[bytes, bytes]"
GROUPS, SHARED_SHARE, BYTES_PER_TOKEN, HELD_S = 64, 0.5, 4, 1.0
CONNECTIONS = 4
_WORDS = ("system", "prompt", "answer", "weather", "market", "garden", "engine", "window", "yellow", "paper", "castle", "bridge")


def headers() -> bytes:
    listed = {":method": "POST", ":path": "/v1/chat/completions", "content-type": "application/json", "user-agent": "benchmark"}
    values = [pb.HeaderValue(key=name, raw_value=value.encode()) for name, value in listed.items()]
    message = pb.ProcessingRequest(request_headers=pb.HttpHeaders(headers=pb.HeaderMap(headers=values)))
    message.protocol_config.request_body_mode = pb.ProtocolConfiguration.FULL_DUPLEX_STREAMED
    return message.SerializeToString()


def words(rng: random.Random, num_tokens: int) -> str:
    text: list[str] = []
    length = 0
    while length < num_tokens * BYTES_PER_TOKEN:
        text.append(rng.choice(_WORDS))
        length += len(text[-1]) + 1
    return " ".join(text)


def body(number: int, shared: list[str], num_tokens: int) -> bytes:
    """A conversation on one of the shared system prompts, with a question of its own."""
    rng = random.Random(number)
    turns = [
        {"role": "system", "content": rng.choice(shared)},
        {"role": "user", "content": words(rng, int(num_tokens * (1 - SHARED_SHARE)))},
    ]
    content = json.dumps({"model": "m", "messages": turns, "max_tokens": 128, "stream": True}).encode()
    return pb.ProcessingRequest(request_body=pb.HttpBody(body=content, end_of_stream=True)).SerializeToString()


RESPONSE = pb.ProcessingRequest(response_headers=pb.HttpHeaders()).SerializeToString()


async def ask(process: Process, head: bytes, content: bytes) -> float | None:
    """Seconds from the end of the body to the endpoint; None: the picker refused it."""
    call = process()
    await call.write(head)
    began = time.perf_counter()
    await call.write(content)
    answer = await call.read()
    took = time.perf_counter() - began
    assert isinstance(answer, bytes)
    picked = pb.ProcessingResponse.FromString(answer).HasField("request_headers")
    if picked:
        await asyncio.sleep(HELD_S / 2)
        await call.write(RESPONSE)
        await asyncio.sleep(HELD_S / 2)
    await call.done_writing()
    while await call.read() is not grpc.aio.EOF:
        pass
    return took if picked else None


async def load(address: str, rate: float, seconds: float, num_tokens: int, warmup_s: float) -> dict[str, object]:
    shared = [words(random.Random(-1 - group), int(num_tokens * SHARED_SHARE)) for group in range(GROUPS)]
    count = int(rate * (seconds + warmup_s))
    bodies = [body(number, shared, num_tokens) for number in range(count)]
    channels = [grpc.aio.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)]) for _ in range(CONNECTIONS)]
    calls: list[Process] = [channel.stream_stream(METHOD) for channel in channels]
    rng, head, begin = random.Random(0), headers(), time.perf_counter() + 0.2
    due, tasks, late = begin, list[asyncio.Task[float | None]](), list[float]()
    for number in range(count):
        due += rng.expovariate(rate)
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        late.append(time.perf_counter() - due)
        tasks.append(asyncio.create_task(ask(calls[number % CONNECTIONS], head, bodies[number])))
    took = await asyncio.gather(*tasks)
    counted = took[int(rate * warmup_s) :]
    elapsed = time.perf_counter() - begin
    for channel in channels:
        await channel.close()
    times = [each * 1000 for each in counted if each is not None]
    return {
        "ms": times,
        "refused": len(counted) - len(times),
        "late_ms": sorted(late)[len(late) * 99 // 100] * 1000,
        "seconds": elapsed,
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kubernetes.gateway_load")
    parser.add_argument("picker")
    parser.add_argument("--rate", type=float, default=200.0)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--warmup", type=float, default=5.0)
    arguments = parser.parse_args()
    found = asyncio.run(load(arguments.picker, arguments.rate, arguments.seconds, arguments.tokens, arguments.warmup))
    json.dump(found, sys.stdout)
    print()


if __name__ == "__main__":
    main()
