"""`make equality`: every prompt, every way, against `transformers` in fp32 (greedy) and against one engine (sampled).

Also draws 10 000 tokens through the mesh with as many seeds' noise and compares them with the softmax by a chi-square test.
Writes `benchmarks/results/equality.json`; exits 1 if any token differs.
"""

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks import reference
from benchmarks.engine_runs import GREEDY, SAMPLED, Draw
from benchmarks.equality_ways import Outcome, engine_ways, mesh_ways, preempting_mesh
from benchmarks.goodness import chi_square_p, draw_first_tokens, softmax_of_next
from benchmarks.harness import Figure, say, write
from benchmarks.prompts import encode_all
from pdmesh.models import ensure_model
from text.tokenizer import Tokenizer

NUM_TOKENS = 64
NUM_DRAWS = 10_000


async def all_ways(folder: Path, prompts: Sequence[Sequence[int]], draw: Draw) -> list[Outcome]:
    """Every way in turn; never two at once."""
    outcomes = []
    for outcome in engine_ways(folder, prompts, draw, NUM_TOKENS):
        say(f"{outcome.way}: evidence {outcome.evidence}")
        outcomes.append(outcome)
    async for outcome in mesh_ways(folder, prompts, draw, NUM_TOKENS):
        say(f"{outcome.way}: evidence {outcome.evidence}")
        outcomes.append(outcome)
    outcomes.append(await preempting_mesh(folder, prompts, draw, NUM_TOKENS))
    say(f"{outcomes[-1].way}: evidence {outcomes[-1].evidence}")
    return outcomes


def figures_of(kind: str, expected: list[list[int]], outcomes: list[Outcome], peer: str) -> list[Figure]:
    """For each way the number of prompts whose tokens are exactly the expected ones."""
    return [
        Figure(
            name=f"{kind}: {outcome.way} (evidence {outcome.evidence})",
            value=sum(got == want for got, want in zip(outcome.tokens, expected, strict=True)),
            unit=f"of {len(expected)} prompts equal, {NUM_TOKENS} tokens each",
            better="higher",
            goal=len(expected),
            limit=len(expected),
            peer=peer,
        )
        for outcome in outcomes
    ]


async def chi_square(folder: Path, prompt: Sequence[int]) -> Figure:
    """p-value of first tokens drawn through the mesh against the softmax of transformers."""
    draws = await draw_first_tokens(folder, prompt, NUM_DRAWS)
    p_value = chi_square_p(draws, softmax_of_next(folder, prompt))
    return Figure(f"chi-square of {NUM_DRAWS} draws through the mesh against the softmax", p_value, "p", "higher", "> 0.001")


async def main() -> int:
    folder = ensure_model("smollm2-135m-instruct", say)
    prompts = encode_all(Tokenizer.load(folder).encode)
    torch.manual_seed(0)
    say(f"{len(prompts)} prompts of {min(map(len, prompts))} to {max(map(len, prompts))} tokens")
    expected = reference.greedy(folder, prompts, NUM_TOKENS)
    greedy = await all_ways(folder, prompts, GREEDY)
    figures = figures_of("greedy", expected, greedy, "transformers generate, fp32")
    # Every second prompt, the longest among them: seeds are about noise, and greedy has been over all lengths.
    sampled = await all_ways(folder, prompts[1::2], SAMPLED)
    figures += figures_of("sampled with a seed", sampled[0].tokens, sampled, "one engine, one prompt at a time")
    figures.append(await chi_square(folder, prompts[1]))
    write("equality", figures, prompt_tokens=[len(prompt) for prompt in prompts])
    without_evidence = [outcome.way for outcome in (*greedy, *sampled) if outcome.evidence <= 0]
    wrong = [figure.name for figure in figures[:-1] if figure.value != figure.goal]
    say(f"wrong: {wrong or 'none'}; ways without evidence: {without_evidence or 'none'}")
    return 1 if wrong or without_evidence else 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
