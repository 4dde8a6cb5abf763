"""Item 1: whoever guesses, however wrongly, alone, batched and through a mesh of processes: no token is another one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks import mesh_runs
from benchmarks.engine_runs import Draw
from benchmarks.equality_ways import Task as MeshTask
from benchmarks.harness import Figure, say
from benchmarks.spec.runs import MOST_SEQS, Bench, Task, answer, groups
from benchmarks.spec.scripted import Scripted
from engine.engine import Engine
from engine.sampling_params import SamplingParams

NUM_TOKENS = 48
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS)
SAMPLED = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=NUM_TOKENS)
PENALIZED = SamplingParams(
    temperature=1.0, min_p=0.05, repetition_penalty=1.1, presence_penalty=0.2, frequency_penalty=0.1, max_tokens=NUM_TOKENS
)
DRAFT = 5
Outputs = list[tuple[int, ...]]


def engine_figures(bench: Bench, prompts: Sequence[tuple[int, ...]], names: Sequence[str]) -> list[Figure]:
    """Each of the proposers, and two that know the answer, against an engine in which nobody guesses."""
    figures = []
    for kind, params in {"greedy": GREEDY, "sampled": SAMPLED, "penalties, min-p": PENALIZED}.items():
        tasks = [Task(prompt, replace(params, seed=number)) for number, prompt in enumerate(prompts)]
        expected = _answers(bench.engine(), tasks, MOST_SEQS)
        assert _answers(bench.engine(), tasks, 1) == expected, "batching changes tokens without speculation"
        for batch in (1, MOST_SEQS):
            for name in names:
                engine = bench.guessing(name)
                figures.append(_figure(f"{kind}: {name}", engine, batch, _answers(engine, tasks, batch), expected))
            for name, right in (("always wrong", 0.0), ("always right", 1.0)):
                scripted = Scripted(right, DRAFT, bench.loaded.config.vocab_size)
                engine = bench.engine([scripted], draft_length=DRAFT)
                outputs = _answers(engine, tasks, batch, scripted, expected)
                figures.append(_figure(f"{kind}: {name}", engine, batch, outputs, expected))
    return figures


async def mesh_figures(folder: Path, prompts: Sequence[tuple[int, ...]], names: Sequence[str], bench: Bench) -> list[Figure]:
    """Through real processes, prefill and decode separated and not, against an engine in which nobody guesses."""
    figures = []
    for kind, draw in {"greedy": Draw(), "sampled": Draw(temperature=0.8, seed=20_26)}.items():
        tasks = [Task(prompt, draw.params(NUM_TOKENS)) for prompt in prompts]
        expected = _answers(bench.engine(), tasks, MOST_SEQS)
        for name in names:
            async with MeshTask(folder, prompts, draw, NUM_TOKENS, {"speculation": name}).mesh("--kv-memory-mb", "512") as mesh:
                for mode in ("remote", "local"):
                    streams = await mesh_runs.run(mesh.router_addresses, prompts, draw, NUM_TOKENS, mode=mode, together=True)
                    outputs = [tuple(tokens) for tokens in mesh_runs.tokens(streams)]
                    figures.append(_counted(f"{kind}: {name}, mesh, {mode}", outputs, expected))
    return figures


def _answers(
    engine: Engine, tasks: Sequence[Task], batch: int, scripted: Scripted | None = None, script: Outputs | None = None
) -> Outputs:
    outputs: Outputs = []
    whole = [*tasks, *[tasks[-1]] * (-len(tasks) % batch)]
    for group in groups(whole, batch):
        if scripted is not None and script is not None:
            known = script[len(outputs) :] + [script[-1]] * batch
            scripted.answers = {str(number): known[number] for number in range(batch)}
        answered = answer(engine, group).outputs
        outputs += [answered[str(number)] for number in range(batch)]
    return outputs[: len(tasks)]


def _figure(name: str, engine: Engine, batch: int, outputs: Outputs, expected: Outputs) -> Figure:
    assert engine.speculator is not None
    stats = engine.speculator.tally.stats()
    kept = sum(each.num_kept for each in stats.by_proposer.values())
    drafted = sum(each.num_verified for each in stats.by_proposer.values())
    return _counted(f"{name}, {'alone' if batch == 1 else f'batches of {batch}'} ({kept} of {drafted} kept)", outputs, expected)


def _counted(name: str, outputs: Outputs, expected: Outputs) -> Figure:
    equal = sum(got == want for got, want in zip(outputs, expected, strict=True))
    say(f"{name}: {equal} of {len(expected)}")
    return Figure(name, equal, f"of {len(expected)} prompts equal", "higher", len(expected), len(expected))
