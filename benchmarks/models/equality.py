"""Equal tokens: a random checkpoint of every family by transformers, by one engine on each backend, and through a mesh of real
processes with a hand-off. All greedy, in float32."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.engine_runs import GREEDY, make_engine, run
from benchmarks.harness import Figure, say
from pdmesh.client.client import AsyncClient
from pdmesh.launcher.mesh import LocalMesh
from pdmesh.launcher.plan import LocalMeshConfig
from tests.support.tiny_families import VARIANTS, make_tiny_family

LENGTHS = (1, 7, 16, 33, 48, 64, 90, 120)
NUM_TOKENS = 32
LONGROPE_SHIFT = 50  # the engine has LongRoPE's long divisors at every position, transformers beyond the original context
GOAL_FAMILIES = 35
WORKER_FLAGS = ("--dtype", "float32", "--max-num-batched-tokens", "64")
MESH_S = 90.0
WAYS = ("torch engine", "native engine", "mesh, REMOTE")

Tokens = list[list[int]]


@dataclass
class Equality:
    """What was found. `shares[variant][way]`: of tokens up to each prompt's first difference; `absent`: why another has none."""

    shares: dict[str, dict[str, float]] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)

    def add(self, variant: str, way: str, expected: Tokens, found: Tokens) -> None:
        """Compare and say."""
        self.shares.setdefault(variant, {})[way] = share = equal_share(expected, found)
        say(f"{variant}, {way}: {share:.3f}")

    def miss(self, variant: str, way: str, why: str) -> None:
        """Note why there is no figure."""
        self.absent[f"{variant}, {way}"] = why
        say(f"{variant}, {way}: not measured: {why}")


def equal_share(expected: Tokens, found: Tokens) -> float:
    """Return the share of `expected` that comes before the first difference of its answer. Pure."""
    pairs = zip(expected, found, strict=True)
    return sum(_equal_length(one, other) for one, other in pairs) / sum(map(len, expected))


def _equal_length(one: Sequence[int], other: Sequence[int]) -> int:
    differing = (index for index, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1])
    return next(differing, min(len(one), len(other)))


def prompts_of(variant: str) -> Tokens:
    """Return eight prompts of bytes that share no block."""
    shift = LONGROPE_SHIFT if "longrope" in variant else 0
    return [
        [(number * 37 + place * 11 + place // 7) % 250 + 1 for place in range(length + shift)]
        for number, length in enumerate(LENGTHS)
    ]


def measure(variants: Sequence[str]) -> Equality:
    """Return what every way gives for these variants."""
    found = Equality()
    for variant in variants:
        with tempfile.TemporaryDirectory(prefix="pdmesh-families-") as folder:
            _measure(found, variant, make_tiny_family(Path(folder) / "model", variant))
    return found


def _measure(found: Equality, variant: str, folder: Path) -> None:
    prompts = prompts_of(variant)
    expected = by_transformers(folder, prompts)
    for backend in ("torch", "native"):
        way = f"{backend} engine"
        try:
            found.add(variant, way, expected, by_engine(folder, prompts, backend))
        except ValueError as error:  # the backend says which part it lacks
            found.miss(variant, way, str(error))
    try:
        found.add(variant, WAYS[2], expected, asyncio.run(asyncio.wait_for(by_mesh(folder, prompts), MESH_S)))
    except (OSError, RuntimeError, TimeoutError) as error:
        found.miss(variant, WAYS[2], f"{type(error).__name__}: {error}")


def by_transformers(folder: Path, prompts: Tokens) -> Tokens:
    """Return its greedy tokens, one prompt after the other."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    reads_images = "text_config" in json.loads((folder / "config.json").read_text(encoding="utf-8"))
    kind: Any = AutoModelForImageTextToText if reads_images else AutoModelForCausalLM
    loaded = kind.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    settings = {"max_new_tokens": NUM_TOKENS, "do_sample": False, "eos_token_id": None}
    answers = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        output = loaded.eval().generate(ids, attention_mask=torch.ones_like(ids), **settings)
        answers.append(output[0, len(prompt) :].tolist())
    return answers


def by_engine(folder: Path, prompts: Tokens, backend: str) -> Tokens:
    """Return those of one engine, prompts in chunks and decode in one batch. Raises ValueError, naming what the backend lacks."""
    settings = {"num_blocks": 256, "max_num_batched_tokens": 64, "num_threads": 1, "speculation": "none"}
    engine = make_engine(folder, backend=backend, dtype="float32", **settings)
    try:
        return run(engine, prompts, GREEDY.params(NUM_TOKENS, ignore_eos=True))
    finally:
        engine.close()


async def by_mesh(folder: Path, prompts: Tokens) -> Tokens:
    """Return those of a router, a prefill worker and a decode worker, each a process: every prompt's KV is handed off. Raises
    RuntimeError where one was not."""
    config = LocalMeshConfig(model=str(folder), port=0, num_threads=1, worker_args=WORKER_FLAGS)
    async with LocalMesh(config) as mesh, AsyncClient(mesh.router_addresses) as client:
        ask = [
            client.generate(prompt, temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, mode="remote", timeout=60)
            for prompt in prompts
        ]
        answers = await asyncio.gather(*ask)
    if not all(answer.timings.kv_bytes for answer in answers):
        raise RuntimeError("a prompt was computed where it was decoded: nothing was handed off")
    return [list(answer.choices[0].token_ids) for answer in answers]


def figures(found: Equality) -> Iterator[Figure]:
    """Yield a figure for each variant and way, the reason where one has none, and how many families are equal. Pure."""
    for variant, ways in found.shares.items():
        for way, share in ways.items():
            yield Figure(f"equal tokens: {variant}, {way}", share, "share", "higher", goal=1.0, peer="transformers")
    for what, why in found.absent.items():
        yield Figure(f"equal tokens: {what}", f"absent: {why}", "share", "higher", peer="transformers")
    for way in WAYS:
        yield _families(found, way)


def _families(found: Equality, way: str) -> Figure:
    kinds = {VARIANTS[variant][0] for variant, ways in found.shares.items() if way in ways}
    unequal = {VARIANTS[variant][0] for variant, ways in found.shares.items() if ways.get(way, 1.0) < 1.0}
    goal = None if way == "native engine" else GOAL_FAMILIES
    return Figure(
        f"families with equal tokens: {way}", len(kinds - unequal), "families", "higher", goal=goal, peer="transformers"
    )
