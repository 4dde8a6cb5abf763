"""Weights that are replaced again and again while a mesh of real weights serves: what reinforcement learning does after each step
of training. The second set is the first with noise.
"""

from __future__ import annotations

import asyncio
import shutil
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from benchmarks.harness import MODEL, Figure, Options, say
from pdmesh.client.client import AsyncClient
from pdmesh.client.types import Delta
from pdmesh.errors import MeshError
from pdmesh.launcher.mesh import LocalMesh
from pdmesh.launcher.plan import LocalMeshConfig

NUM_SWAPS, NUM_CLIENTS, NUM_TOKENS, NUM_PROMPTS = 20, 6, 48, 12
NOISE = 0.02
GOAL_PAUSE_S = 1.0


def noisy(folder: Path, model: Path) -> Path:
    """The model with noise on its matrices, in a folder of its own."""
    target = folder / "noisy"
    if (target / "model.safetensors").exists():
        return target
    target.mkdir(parents=True, exist_ok=True)
    for path in model.iterdir():
        if path.suffix == ".json":
            shutil.copy(path, target / path.name)
    torch.manual_seed(1)
    tensors = load_file(model / "model.safetensors")
    for name, tensor in tensors.items():
        if tensor.dim() == 2:
            tensors[name] = tensor + NOISE * tensor.std() * torch.randn_like(tensor)
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    return target


@dataclass
class Seen:
    """What came of the load. `gaps_s`: between tokens of one answer; `num_tokens`: of all."""

    answers: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    num_tokens: int = 0


PROMPTS = [
    f"{number}. The history of the city begins with a small harbour, in which ships of many countries met, and"
    for number in range(NUM_PROMPTS)
]


async def ask(client: AsyncClient, place: int, seen: Seen) -> tuple[int, ...]:
    tokens: list[int] = []
    last = 0.0
    options = {"temperature": 0.7, "seed": 100 + place, "max_tokens": NUM_TOKENS, "ignore_eos": True, "timeout": 60.0}
    async with client.generate_stream(PROMPTS[place], **options) as stream:  # type: ignore[arg-type]
        async for event in stream:
            if isinstance(event, Delta) and event.token_ids:
                now = time.monotonic()
                if last:
                    seen.gaps_s.append(now - last)
                last, tokens = now, [*tokens, *event.token_ids]
                seen.num_tokens += len(event.token_ids)
    return tuple(tokens)


async def keep_asking(client: AsyncClient, place: int, seen: Seen, stop: asyncio.Event) -> None:
    """One of the streams: it goes through its share of the prompts until `stop` is set."""
    while not stop.is_set():
        try:
            seen.answers.append((place, await ask(client, place, seen)))
        except MeshError as error:
            seen.errors.append(f"{type(error).__name__}: {error}")
            say(seen.errors[-1])
        place = (place + NUM_CLIENTS) % NUM_PROMPTS


async def figures(options: Options) -> list[Figure]:
    """Two workers with one core each; the same prompts again and again."""
    folders = (options.model, await asyncio.to_thread(noisy, options.folder, options.model))
    config = LocalMeshConfig(
        model=str(options.model), model_name=MODEL, num_both=2, port=0, num_threads=1, worker_args=("--kv-memory-mb", "512")
    )
    num_swaps = int(options.pick(NUM_SWAPS, 4))
    async with LocalMesh(config, on_event=say) as mesh, AsyncClient(mesh.router_addresses) as client:
        expected = []
        for folder in (*folders, folders[0]):
            await client.update_weights(str(folder), timeout=300)
            expected.append([await ask(client, place, Seen()) for place in range(NUM_PROMPTS)])
        assert expected[0] == expected[2] != expected[1], (
            "the noise is to change the answers, and the way back to change them back"
        )
        quiet = await _under_load(client, [], folders, options.pick(20.0, 4.0))
        busy_s, pauses = list[float](), list[float]()
        swaps = [(folders[(number + 1) % 2], busy_s, pauses) for number in range(num_swaps)]
        seen = await _under_load(client, swaps, folders, 2.0)
    of_neither = [tokens for place, tokens in seen.answers if tokens not in (expected[0][place], expected[1][place])]
    of_new = sum(tokens == expected[1][place] for place, tokens in seen.answers)
    what = f"weights of SmolLM2-135M replaced {num_swaps} times under load ({NUM_CLIENTS} streams, two workers)"
    return [
        Figure(f"{what}: answers of neither version, or of both", len(of_neither), "answers", "lower", 0),
        Figure(f"{what}: failed requests", len(seen.errors), "requests", "lower", 0),
        Figure(f"{what}: answers", len(seen.answers), "answers", "higher"),
        Figure(f"{what}: answers of the second version", of_new, "answers", "higher"),
        Figure(f"{what}: longest gap between two tokens of an answer", max(seen.gaps_s), "s", "lower", GOAL_PAUSE_S),
        Figure("the same load without: longest gap between two tokens", max(quiet.gaps_s), "s", "lower"),
        Figure(f"{what}: longest time without a step because of it", max(pauses), "s", "lower", GOAL_PAUSE_S),
        Figure(f"{what}: from the call until all workers have them, median", statistics.median(busy_s), "s", "lower"),
        Figure(f"{what}: the same, longest", max(busy_s), "s", "lower"),
    ]


async def _under_load(
    client: AsyncClient, swaps: list[tuple[Path, list[float], list[float]]], folders: tuple[Path, Path], after_s: float
) -> Seen:
    seen, stop = Seen(), asyncio.Event()
    asking = [asyncio.create_task(keep_asking(client, number, seen, stop)) for number in range(NUM_CLIENTS)]
    for folder, busy_s, pauses in swaps:
        began = time.monotonic()
        done = await client.update_weights(str(folder), timeout=300)
        assert not [worker.error for worker in done.workers if worker.error], done
        busy_s.append(time.monotonic() - began)
        pauses += [worker.pause_s for worker in done.workers]
        say(f"weights taken within {busy_s[-1]:.2f} s, no step for {max(pauses[-2:]) * 1000:.1f} ms")
        await asyncio.sleep(1.0)
    await asyncio.sleep(after_s)
    stop.set()
    await asyncio.gather(*asking)
    return seen
