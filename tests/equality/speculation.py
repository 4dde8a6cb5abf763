"""Item 1, in one engine: whoever guesses, however wrongly, alone and batched: no token and no log-probability is another one.

Policies verify what pays and may verify nothing; here every proposer's guesses are verified DRAFT at a time, whatever they cost,
and a run in which none was, or in which none of a proposer's came true that can be right, fails: it would prove nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.engine_runs import Draw, flags_of
from benchmarks.harness import Figure, say
from benchmarks.spec.forced import Scripted
from benchmarks.spec.runs import MOST_SEQS, Bench, Output, Task, answer, counts, groups, guessed, of_length
from pdmesh.client.client import AsyncClient
from pdmesh.engine.engine import Engine
from pdmesh.engine.speculation.ngrams.lookahead import NAME as LOOKAHEAD
from pdmesh.engine.speculation.ngrams.lookahead import Lookahead
from pdmesh.launcher.mesh import LocalMesh
from pdmesh.launcher.plan import LocalMeshConfig
from pdmesh.sampling_params import SamplingParams

NUM_BATCHED, NUM_ALONE = 24, 8
"""Tokens of an answer."""
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_BATCHED)
SAMPLED = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=NUM_BATCHED)
DRAFT = 4
Kinds = Mapping[str, Sequence[Task]]
Outputs = list[Output]


@dataclass(frozen=True)
class Guess:
    """One way to guess. `settings`: of the engine's configuration."""

    name: str
    speculation: str
    settings: Mapping[str, object]


@dataclass(frozen=True)
class Way:
    """An engine that guesses. `script`: who is told the answers before; `counted`: the proposer whose guesses are to be verified
    for a run to show anything, else anybody's."""

    name: str
    engine: Engine
    script: Scripted | None = None
    may_be_right: bool = True
    counted: str | None = None

    @property
    def counts(self) -> tuple[int, int]:
        """Drafted tokens that were verified so far, and kept."""
        return counts(guessed(self.engine), self.counted)


def kinds_of(prompts: Sequence[tuple[int, ...]], others: Kinds) -> dict[str, Sequence[Task]]:
    """All prompts greedy and sampled, and the workloads that are drawn in other ways."""
    drawn = {"greedy": GREEDY, "sampled": SAMPLED}
    of_prompts = {
        kind: [Task(prompt, replace(params, seed=number)) for number, prompt in enumerate(prompts)]
        for kind, params in drawn.items()
    }
    return {**of_prompts, **{kind: [task.shorter(NUM_BATCHED) for task in tasks] for kind, tasks in others.items()}}


def engine_figures(bench: Bench, kinds: Kinds, guesses: Sequence[Guess]) -> Iterator[Figure]:
    """Each way to guess, and two that know the answer, against an engine in which nobody does."""
    plain = bench.engine()
    wanted = {kind: answers(plain, tasks, MOST_SEQS) for kind, tasks in kinds.items()}
    for kind, tasks in kinds.items():
        yield _counted(f"{kind}: none, alone", answers(plain, _short(tasks), 1), _firsts(wanted[kind]))
    del plain
    for way in _ways(bench, guesses):
        yield from _compared(way, kinds, wanted)


def _ways(bench: Bench, guesses: Sequence[Guess]) -> Iterator[Way]:
    """One after the other: two pools at most are open."""
    for guess in guesses:
        if guess.speculation != LOOKAHEAD:
            yield Way(guess.name, bench.guessing(guess.speculation, **of_length(DRAFT), **guess.settings))
    vocab_size = bench.loaded.config.vocab_size
    wrong, right = Scripted(0.0, DRAFT, vocab_size), Scripted(1.0, DRAFT, vocab_size)
    # Lookahead guesses from guesses that were verified; by itself it begins to seldom.
    lookahead = bench.engine([Lookahead(), wrong], **of_length(DRAFT))
    yield Way("lookahead, beside wrong guesses", lookahead, wrong, counted=LOOKAHEAD)
    yield Way("always wrong", bench.engine([wrong], **of_length(DRAFT)), wrong, may_be_right=False)
    yield Way("always right", bench.engine([right], **of_length(DRAFT)), right)


def _compared(way: Way, kinds: Kinds, wanted: Mapping[str, Outputs]) -> Iterator[Figure]:
    """In batches, then alone, where the prompts are in the prefix cache and answers are shorter: enough for some drafts each."""
    for batch in (MOST_SEQS, 1):
        before, how = way.counts, "alone" if batch == 1 else f"batches of {batch}"
        for kind, tasks in kinds.items():
            asked, expected = (tasks, wanted[kind]) if batch > 1 else (_short(tasks), _firsts(wanted[kind]))
            so_far, started_s = way.counts, time.perf_counter()
            got = answers(way.engine, asked, batch, way.script, wanted[kind])
            verified, kept = _since(so_far, way.counts)
            say(f"{way.name}, {kind}, {how}: {time.perf_counter() - started_s:.1f} s")
            yield _counted(f"{kind}: {way.name}, {how} ({kept} of {verified} kept)", got, expected)
        check_evidence(f"{way.name}, {how}", *_since(before, way.counts), may_be_right=way.may_be_right)


def _since(before: tuple[int, int], now: tuple[int, int]) -> tuple[int, int]:
    return now[0] - before[0], now[1] - before[1]


def check_evidence(name: str, verified: int, kept: int, *, may_be_right: bool) -> None:
    """Raises AssertionError where a run shows nothing of speculation."""
    assert verified, f"{name}: no drafted token was verified, so equal tokens prove nothing"
    if may_be_right:
        assert kept, f"{name}: none of {verified} drafted tokens was kept, so equal tokens prove little"
    else:
        assert not kept, f"{name}: {kept} of {verified} drafted tokens were kept"


def answers(
    engine: Engine, tasks: Sequence[Task], batch: int, scripted: Scripted | None = None, script: Sequence[Output] = ()
) -> Outputs:
    """So many tasks at a time; `script`: what the tasks answer, for who is to know."""
    outputs: Outputs = []
    whole = [*tasks, *[tasks[-1]] * (-len(tasks) % batch)]
    for group in groups(whole, batch):
        if scripted is not None:
            known = [*script[len(outputs) :], *[script[-1]] * batch]
            scripted.answers = [output.token_ids for output in known[:batch]]
        outputs += answer(engine, group).outputs
    return outputs[: len(tasks)]


def _short(tasks: Sequence[Task]) -> list[Task]:
    return [task.shorter(NUM_ALONE) for task in tasks]


def _firsts(outputs: Sequence[Output]) -> Outputs:
    return [output.first(NUM_ALONE) for output in outputs]


def _counted(name: str, outputs: Sequence[Output], expected: Sequence[Output]) -> Figure:
    equal = sum(got == want for got, want in zip(outputs, expected, strict=True))
    say(f"{name}: {equal} of {len(expected)}")
    return Figure(name, equal, f"of {len(expected)} prompts equal", "higher", len(expected), len(expected))


# Item 1, through a mesh of processes: whoever guesses in the workers, prefill and decode apart or not, together and alone.


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
            async for figure in _compared_in_mesh(client, guess, prompts, wanted):
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


async def _compared_in_mesh(
    client: AsyncClient, guess: Guess, prompts: Prompts, wanted: Mapping[str, Tokens]
) -> AsyncIterator[Figure]:
    verified = kept = 0
    for kind, draw in DRAWS.items():
        for mode in MODES:
            together = await _ask(client, prompts, draw, NUM_TOGETHER, mode, at_once=MOST_SEQS)
            alone = await _ask(client, prompts[::ALONE_EACH], draw, NUM_ALONE, mode, at_once=1)
            firsts = [tokens[:NUM_ALONE] for tokens in wanted[kind][::ALONE_EACH]]
            yield _counted_in_mesh(f"{kind}: {guess.name}, mesh, {mode}, {MOST_SEQS} at once", together, wanted[kind])
            yield _counted_in_mesh(f"{kind}: {guess.name}, mesh, {mode}, alone", alone, firsts)
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


def _counted_in_mesh(name: str, got: Got, expected: Tokens) -> Figure:
    equal = sum(mine == theirs for mine, theirs in zip(got.outputs, expected, strict=True))
    name = f"{name} ({got.kept} of {got.verified} kept)"
    say(f"{name}: {equal} of {len(expected)}")
    return Figure(name, equal, f"of {len(expected)} prompts equal", "higher", len(expected), len(expected))
