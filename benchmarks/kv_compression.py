"""`make bench-kv-compression`: how much smaller real KV becomes on tiers, and how fast, by the KV's dtype.

SmolLM2-135M computes a page of documentation and a page of source code; the blocks of its pool are compressed and decompressed as
tiers do it, on one core. Below `break_even` a disk or a network gives compressed blocks sooner than plain ones, if reading and
decompressing follow each other.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import torch
from tokenizers import Tokenizer

from benchmarks.harness import MODEL, PLAIN, Figure, say, write
from kvtransfer.manifest import DTYPE_BYTES
from kvtransfer.tiers.backends import coding
from kvtransfer.tiers.pool_blocks import ViewedBlocks
from kvtransfer.tiers.threads import TierThreads
from pdmesh.engine.config import EngineConfig
from pdmesh.engine.engine import Engine
from pdmesh.engine.request import EngineRequest
from pdmesh.models.registry import ensure_model
from pdmesh.sampling_params import SamplingParams
from pdmesh.text.block_hash import hash_block

ROOT = Path(__file__).parents[1]
PAGES = ("docs/resilience.md", "kvtransfer/tiers/tiers.py")
NUM_TOKENS, NUM_BLOCKS, NUM_PASSES = 2000, 100, 15
BACKENDS = {"bfloat16": "native", "float32": "torch", "int8": "native"}

In = TypeVar("In")
Out = TypeVar("Out")


async def blocks_of(folder: Path, dtype: str) -> list[memoryview]:
    """Return the contents of blocks of real KV, as tiers have them."""
    text = "".join((ROOT / page).read_text(encoding="utf-8") for page in PAGES)
    prompt = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids[:NUM_TOKENS]
    config = EngineConfig(model=str(folder), num_blocks=200, backend=BACKENDS[dtype], kv_dtype=dtype, **PLAIN)  # type: ignore[arg-type]
    engine = Engine(config, hash_block=hash_block)
    engine.add(EngineRequest("r", tuple(prompt), SamplingParams(max_tokens=1)))
    while engine.step() is not None:
        pass
    _, hashes = engine.published_blocks()
    pinned = engine.sharing.pin_any("bench", hashes[:NUM_BLOCKS])
    threads = TierThreads(1, name="bench", is_behind=False)
    try:
        found = await ViewedBlocks(engine.kv, threads).read([each for each in pinned if each is not None])
    finally:
        threads.close()
        engine.close()
    return [each.content for each in found]


def timed(call: Callable[[In], Out], items: Sequence[In]) -> tuple[list[Out], float]:
    """Return the results, and the seconds that the fastest pass had a core: others may want the cores as well."""
    best, results = float("inf"), []
    for _ in range(NUM_PASSES):
        began = time.thread_time()
        results = [call(each) for each in items]
        best = min(best, time.thread_time() - began)
    return results, best


def figures_of(dtype: str, blocks: Sequence[memoryview]) -> list[Figure]:
    """Return what compression does to these blocks of KV."""
    width, num_bytes = DTYPE_BYTES[dtype], sum(each.nbytes for each in blocks)
    coded, encode_s = timed(lambda block: coding.encode(block, width) or [block], blocks)
    joined = [memoryview(b"".join(pieces)) for pieces in coded]
    back, decode_s = timed(lambda pair: coding.decode(pair[0], pair[1].nbytes, width), list(zip(joined, blocks, strict=True)))
    if any(one != other for one, other in zip(back, blocks, strict=True)):
        raise AssertionError(f"{dtype}: what came back is not what was written")
    ratio, decode = num_bytes / sum(each.nbytes for each in joined), num_bytes / decode_s / 1e6
    return [
        Figure(f"{dtype}.ratio", round(ratio, 3), "plain / compressed", "higher"),
        Figure(f"{dtype}.compress", round(num_bytes / encode_s / 1e6), "MB/s of KV", "higher"),
        Figure(f"{dtype}.decompress", round(decode), "MB/s of KV", "higher"),
        Figure(f"{dtype}.break_even", round(decode * (1 - 1 / ratio)), "MB/s of the disk or network", "higher"),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kv_compression", description=(__doc__ or "").split("\n")[0])
    parser.parse_args()
    torch.set_num_threads(1)
    folder, figures = ensure_model(MODEL, say), []
    for dtype in BACKENDS:
        figures += figures_of(dtype, asyncio.run(blocks_of(folder, dtype)))
    write("kv_compression", figures)


if __name__ == "__main__":
    main()
