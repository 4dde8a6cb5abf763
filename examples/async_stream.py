"""Several requests at once on one connection, each streamed as its tokens come.

python -m examples.async_stream ROUTER [PROMPT …]
"""

import asyncio
import sys

from pdmesh.client import AsyncClient, Completed, Delta


async def answer(client: AsyncClient, prompt: str) -> None:
    """Prints the answer when it is there, and how long it took."""
    text = ""
    async with client.generate_stream(prompt, max_tokens=24, temperature=0.8, seed=7, timeout=60) as stream:
        async for event in stream:
            if isinstance(event, Delta):
                text += event.text
            elif isinstance(event, Completed):
                ttft_ms, tpot_ms = event.timings.ttft_ns / 1e6, event.timings.tpot_ns / 1e6
                print(f"{prompt!r} → {text!r}")
                print(f"  {event.usage.completion_tokens} tokens, the first after {ttft_ms:.1f} ms, then {tpot_ms:.1f} ms each")


async def main(router: str, prompts: list[str]) -> None:
    """All prompts at the same time."""
    async with AsyncClient(router) as client:
        await asyncio.gather(*(answer(client, prompt) for prompt in prompts))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2:] or ["Once upon a time", "The capital of France is"]))
