"""The hand-off of 1 GB of KV at the shape of 8B between two processes on this GPU, over every transport that both ends offer.

alone     the KV is there: from the call of the push until the receiver has committed
beside    it is pushed as the prefill makes it final; what the transfer adds to the prefill is what is not hidden:

          prefill alone   ├──────────────┤
          with the push   ├────────────────┤ last layer ┤ committed          (with - alone) / transfer
"""

from __future__ import annotations

import asyncio
import time
from functools import partial

import torch

from benchmarks.gpu.context import Context
from benchmarks.gpu.drawn import engine_config
from benchmarks.gpu.handoff_ends import BLOCK_SIZE, MODEL, Ends, ends_for, one_launch_at_a_time
from benchmarks.gpu.handoff_figures import Samples, figures, size_words
from benchmarks.gpu.handoff_sender import Other, SendingEnd, receiving
from benchmarks.gpu.timing import replayed_s
from benchmarks.gpu.weights import make_subject
from benchmarks.harness import Figure
from kvtransfer.errors import PushFailed
from kvtransfer.native import library as native_library
from pdmesh.engine.kv_cache.streams import streams_of

ROUNDS = 3
PINNED_BYTES = 1 << 28
EXPECTED_S = 8.0  # of one transport


def run(context: Context) -> None:
    if context.device == "cpu":
        one_launch_at_a_time()
    native_library.prepare()  # else the first rounds would be Python's
    _pinned(context)
    asyncio.run(_measure(context, ends_for(context.device, context.scale)))


def _pinned(context: Context) -> None:
    """What a transport that goes through the host is limited by."""
    size = min(PINNED_BYTES, context.scale.copy_bytes)
    source = torch.ones(size, dtype=torch.uint8, device=context.device)
    room = streams_of(source.device).host_room(size)
    copies = {"to": partial(room.copy_, source, non_blocking=True), "from": partial(source.copy_, room, non_blocking=True)}
    for words, copy in copies.items():
        copy()
        seconds = replayed_s({"": copy}, context.device)[""]  # so long that nobody sees a launch: no graph
        context.add(Figure(f"copies {words} pinned memory of the host", size / seconds / 1e9, "GB/s", "higher"))


async def _measure(context: Context, ends: Ends) -> None:
    size = ends.shape.num_bytes
    context.note(
        f"hand-off: {size_words(size)} are {size} bytes: {ends.num_blocks} blocks of {BLOCK_SIZE} tokens, read and written"
    )
    config = engine_config(context.device, max_num_seqs=1, max_context=ends.num_tokens + BLOCK_SIZE)
    async with receiving(ends) as other:  # it starts while weights are drawn
        subject = make_subject(context.scale.config(MODEL), "none", config, context.dtype)
        end = SendingEnd(ends, subject.engine)
        await end.start()
        try:
            names = end.transports((await other.read())["transports"])
            await _warm_up(end)
            await _over_all(context, end, other, names)
        finally:
            await end.close()
        subject.close()


async def _over_all(context: Context, end: SendingEnd, other: Other, names: list[str]) -> None:
    """Goals are for the first that works: a mesh takes it."""
    is_best = True
    for name in names:
        if not context.has_time(EXPECTED_S if context.device == "cuda" else 0.0, f"hand-off over {name}"):
            continue
        try:
            samples = await _samples(context, end, other, name)
        except PushFailed as error:
            context.fail(f"hand-off over {name}: {error}")
            await end.release()
            continue
        for figure in figures(name, samples, context.machine.bytes_per_s, is_best=is_best):
            context.add(figure)
        is_best = False


async def _warm_up(end: SendingEnd) -> None:
    await end.prefill()
    await end.release()


async def _samples(context: Context, end: SendingEnd, other: Other, name: str) -> Samples:
    """Alone, beside, in turn; what has arrived is compared after each kind of push."""
    samples = Samples()
    began = time.monotonic()
    for number in range((ROUNDS if context.device == "cuda" else 1) + 1):
        alone = await end.prefill()
        result = await end.push_all(await other.reserve(name))
        await _compare(context, end, other, f"{name}, of a prefill that is over", number)
        await end.release()
        beside, late_ns = await end.prefill_and_push(await other.reserve(name))
        await _compare(context, end, other, f"{name}, beside the prefill", number)
        await end.release()
        if number == 0:
            continue  # it warms up: what each side compiles, and what the sender learns of the link
        samples.num_bytes = result.num_bytes
        samples.alone.append(alone.seconds)
        samples.transfer.append(result.elapsed_ns / 1e9)
        samples.beside.append(beside.seconds)
        samples.late_ns.append(late_ns)
        if not context.deadline.allows((time.monotonic() - began) / (number + 1)):
            break
    return samples


async def _compare(context: Context, end: SendingEnd, other: Other, name: str, number: int) -> None:
    """The first of its kind: it is not what is measured."""
    if number == 0 and (await other.ask({"sums": True}))["sums"] != end.sums():
        context.fail(f"hand-off over {name}: what has arrived is not what was sent")
