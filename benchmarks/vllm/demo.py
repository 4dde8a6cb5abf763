"""What a request through `pdmesh up --engine vllm` shows of itself: whether the parts of its TTFT add up, what carried its KV,
how much of it, and what the prefix caches had."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.harness import Figure, Options, say
from benchmarks.vllm.answers import Settings
from pdmesh.client.client import AsyncClient
from pdmesh.client.types import Generation, PrefillMode
from pdmesh.launcher.mesh import LocalMesh
from tests.equality.prompts import texts

NUM_REQUESTS = 20
NUM_TOKENS = 24
LONG_CHARACTERS = 1500
QUESTION = "What is the capital of France?"
TIMEOUT_S = 120.0


def parts_error(answer: Generation) -> float:
    """Return by which share of its TTFT the parts of a request's TTFT do not add up to it. Pure."""
    timings = answer.timings
    return abs(sum(timings.ttft_parts.values()) - timings.ttft_ns) / timings.ttft_ns


def figures(answers: Sequence[Generation], again: Sequence[Generation]) -> list[Figure]:
    """Return the figures of requests, the first of which asked for France's capital, and of the same ones sent again. Pure."""
    every = [*answers, *again]
    errors = [parts_error(answer) for answer in every]
    handed = [answer for answer in every if answer.timings.mode is PrefillMode.REMOTE and answer.timings.transport]
    unit = f"share of {len(every)} requests"
    transports = ", ".join(sorted({answer.timings.transport for answer in handed})) or "none"
    names_paris = int("Paris" in answers[0].choices[0].text)
    hits = sum(answer.usage.cached_tokens > 0 for answer in again)
    return [
        Figure("answers to the question for the capital of France that name Paris", names_paris, "of 1", "higher", goal=1),
        Figure("TTFT: largest difference of the sum of its parts", max(errors), "share of TTFT", "lower", goal=0.05),
        Figure("requests with a hand-off whose transport is reported", len(handed) / len(every), unit, "higher", goal=1.0),
        Figure("transport", transports, "name", "higher"),
        Figure("KV bytes of a hand-off: fewest", min(answer.timings.kv_bytes for answer in every), "bytes", "higher", goal=1),
        Figure("KV bytes of a hand-off: most", max(answer.timings.kv_bytes for answer in every), "bytes", "higher"),
        Figure("requests sent again with cache hits", hits / len(again), f"share of {len(again)} requests", "higher", goal=1.0),
    ]


def long_prompts(count: int) -> list[str]:
    """Return prompts of several of vLLM's blocks, which have 128 tokens on a CPU: so that a prefix can be found. Pure."""
    return [f"{number}. " + f"{text}\n" * (1 + LONG_CHARACTERS // len(text)) for number, text in enumerate(texts()[:count])]


async def measure(options: Options) -> list[Figure]:
    """Ask for France's capital twice, and long prompts, then the same long ones again."""
    long = long_prompts(int(options.pick(NUM_REQUESTS, 6)) // 2 - 1)
    config = Settings(options.model, "auto", vllm_args=()).mesh()  # compiled, as `pdmesh up` starts it
    async with LocalMesh(config, on_event=say) as mesh, AsyncClient(mesh.router_addresses) as client:
        answers = [await _ask(client, prompt) for prompt in (QUESTION, QUESTION, *long)]
        again = [await _ask(client, prompt) for prompt in long]
    return figures(answers, again)


async def _ask(client: AsyncClient, prompt: str) -> Generation:
    chat = [("user", prompt)]
    answer = await client.chat(chat, temperature=0, max_tokens=NUM_TOKENS, mode="remote", timeout=TIMEOUT_S)
    timings, text = answer.timings, answer.choices[0].text
    say(f"{prompt[:40]!r}: {text!r}")
    say(f"TTFT {timings.ttft_ns / 1e6:.0f} ms, {timings.kv_bytes} bytes, {answer.usage.cached_tokens} tokens cached")
    return answer
