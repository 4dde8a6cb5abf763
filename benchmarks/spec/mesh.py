"""Item 1, through a mesh of processes: whoever guesses in the workers, prefill and decode apart or not, together and alone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.engine_runs import Draw, flags_of
from benchmarks.harness import Figure, say
from benchmarks.spec.runs import MOST_SEQS, Bench, Task, of_length
from benchmarks.spec.tokens import DRAFT, NUM_ALONE, Guess, answers, check_evidence
from pdmesh.client.client import AsyncClient
from pdmesh.launcher.mesh import LocalMesh
from pdmesh.launcher.plan import LocalMeshConfig

NUM_TOGETHER = 16
"""Tokens of an answer."""
ALONE_EACH = 5
"""Of so many prompts one is also asked alone."""
DRAWS: Mapping[str, Draw] = {"greedy": Draw(), "sampled": Draw(temperature=0.8, seed=20_26)}
MODES = ("remote", "local")
KV_MEMORY_MB = 1024
TIMEOUT_S = 600.0
Prompts = Sequence[tuple[int, ...]]
Tokens = list[tuple[int, ...]]


@dataclass(frozen=True)
class Got:
    """`verified`, `kept`: drafted tokens, as the answers' usage tells."""

    outputs: Tokens
    verified: int
    kept: int


async def mesh_figures(folder: Path, prompts: Prompts, guesses: Sequence[Guess], bench: Bench) -> AsyncIterator[Figure]:
    """Against one engine of this process in which nobody guesses."""
    wanted = {kind: _expected(bench, prompts, draw) for kind, draw in DRAWS.items()}
    for guess in (Guess("none", "none", {}), *guesses):
        async with _mesh(folder, _settings(guess)) as mesh, AsyncClient(mesh.router_addresses) as client:
            async for figure in _compared(client, guess, prompts, wanted):
                yield figure


def _settings(guess: Guess) -> dict[str, object]:
    length = {} if guess.speculation == "none" else of_length(DRAFT)  # refused where nobody guesses
    return {"speculation": guess.speculation, **length, **guess.settings}


def _mesh(folder: Path, settings: Mapping[str, object]) -> LocalMesh:
    flags = (*flags_of(settings), "--kv-memory-mb", str(KV_MEMORY_MB))
    return LocalMesh(LocalMeshConfig(model=str(folder), port=0, worker_args=flags))


def _expected(bench: Bench, prompts: Prompts, draw: Draw) -> Tokens:
    tasks = [Task(prompt, draw.params(NUM_TOGETHER)) for prompt in prompts]
    return [tuple(output.token_ids) for output in answers(bench.engine(), tasks, MOST_SEQS)]


async def _compared(client: AsyncClient, guess: Guess, prompts: Prompts, wanted: Mapping[str, Tokens]) -> AsyncIterator[Figure]:
    verified = kept = 0
    for kind, draw in DRAWS.items():
        for mode in MODES:
            together = await _ask(client, prompts, draw, NUM_TOGETHER, mode, at_once=MOST_SEQS)
            alone = await _ask(client, prompts[::ALONE_EACH], draw, NUM_ALONE, mode, at_once=1)
            firsts = [tokens[:NUM_ALONE] for tokens in wanted[kind][::ALONE_EACH]]
            yield _counted(f"{kind}: {guess.name}, mesh, {mode}, {MOST_SEQS} at once", together, wanted[kind])
            yield _counted(f"{kind}: {guess.name}, mesh, {mode}, alone", alone, firsts)
            verified, kept = verified + together.verified + alone.verified, kept + together.kept + alone.kept
    if guess.speculation != "none":
        check_evidence(f"{guess.name}, mesh", verified, kept, may_be_right=True)


async def _ask(client: AsyncClient, prompts: Prompts, draw: Draw, num_tokens: int, mode: str, at_once: int) -> Got:
    turn = asyncio.Semaphore(at_once)

    async def one(prompt: tuple[int, ...]) -> tuple[tuple[int, ...], int, int]:
        async with turn:
            answer = await client.generate(
                prompt, timeout=TIMEOUT_S, max_tokens=num_tokens, temperature=draw.temperature, seed=draw.seed, mode=mode
            )
        return tuple(answer.choices[0].token_ids), answer.usage.drafted_tokens, answer.usage.accepted_tokens

    found = await asyncio.gather(*map(one, prompts))
    return Got([tokens for tokens, _, _ in found], sum(drafted for _, drafted, _ in found), sum(kept for _, _, kept in found))


def _counted(name: str, got: Got, expected: Tokens) -> Figure:
    equal = sum(mine == theirs for mine, theirs in zip(got.outputs, expected, strict=True))
    name = f"{name} ({got.kept} of {got.verified} kept)"
    say(f"{name}: {equal} of {len(expected)}")
    return Figure(name, equal, f"of {len(expected)} prompts equal", "higher", len(expected), len(expected))
