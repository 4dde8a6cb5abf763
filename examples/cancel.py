"""Leaving a stream ends its work on every machine: by leaving the `with`, by `cancel` from outside, by cancelling the task.

python -m examples.cancel ROUTER
"""

import asyncio
import sys

from pdmesh import errors
from pdmesh.client import AsyncClient, Delta
from pdmesh.client.stream import AsyncStream


def story(client: AsyncClient) -> AsyncStream:
    """A long answer."""
    return client.generate_stream("Once upon a time", max_tokens=1000, ignore_eos=True, seed=7)


async def leave_after(client: AsyncClient, num_tokens: int) -> int:
    """Reads so many tokens, then leaves; returns how many it got."""
    received = 0
    async with story(client) as stream:
        async for event in stream:
            received += len(event.token_ids) if isinstance(event, Delta) else 0
            if received >= num_tokens:
                break
    return received


async def cancel_from_outside(client: AsyncClient) -> str:
    """Another task ends the stream, as a "stop" button would."""
    stream = story(client)
    asyncio.get_running_loop().call_later(0.3, stream.cancel)
    try:
        async for _ in stream:
            pass
    except errors.Cancelled as error:
        return error.message
    return "it was complete before"


async def cancel_the_task(client: AsyncClient) -> str:
    """The task that reads is cancelled, as frameworks do when their own caller hangs up."""
    task = asyncio.create_task(leave_after(client, num_tokens=10_000))
    await asyncio.sleep(0.3)
    task.cancel()
    try:
        await task
    except asyncio.CancelledError:
        return "the task is cancelled"
    return "it was complete before"


async def main(router: str) -> None:
    """All three ways; then asks the router what is left of them."""
    async with AsyncClient(router) as client:
        print(f"left after {await leave_after(client, num_tokens=3)} tokens")
        print(await cancel_from_outside(client))
        print(await cancel_the_task(client))
        for _ in range(50):
            status = await client.status(timeout=5)
            if status.num_inflight == 0:
                break
            await asyncio.sleep(0.1)
        print(f"{status.num_inflight} requests in flight")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
