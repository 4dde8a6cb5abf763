"""`make equality`: every prompt, every way, in float32 against `transformers` (greedy) and one engine (sampled), and in the
default numbers (int8) against one engine: what separates, batches, preempts or dies changes no token, nor
KV that workers restore from their tiers and fetch from each other.

Also draws 10 000 tokens through the mesh with as many seeds' noise and compares them with the softmax by a chi-square test.
Writes `benchmarks/results/equality.json`; exits 1 if any token differs.
"""

import asyncio
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from benchmarks.engine_runs import FLOAT32, GREEDY, SAMPLED
from benchmarks.harness import Figure, parser_of, say, write
from pdmesh.models.registry import ensure_model
from pdmesh.text.tokenizer import Tokenizer
from tests.equality import reference
from tests.equality.goodness import chi_square_p, draw_first_tokens, softmax_of_next
from tests.equality.kv_ways import forced_ways
from tests.equality.prompts import encode_all
from tests.equality.ways import Outcome, Task, engine_ways, mesh_ways, preempting_mesh

NUM_TOKENS = 64
NUM_DRAWS = 10_000


async def all_ways(task: Task) -> list[Outcome]:
    """Every way in turn; never two at once."""
    outcomes = []
    for outcome in engine_ways(task):
        say(f"{outcome.way}: evidence {outcome.evidence}")
        outcomes.append(outcome)
    async for outcome in mesh_ways(task):
        say(f"{outcome.way}: evidence {outcome.evidence}")
        outcomes.append(outcome)
    outcomes.append(await preempting_mesh(task))
    say(f"{outcomes[-1].way}: evidence {outcomes[-1].evidence}")
    with tempfile.TemporaryDirectory(prefix="pdmesh-equality-") as folder:
        async for outcome in forced_ways(task, Path(folder)):
            say(f"{outcome.way}: evidence {outcome.evidence}")
            outcomes.append(outcome)
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


@dataclass
class Sections:
    """What was found so far, section by section."""

    figures: list[Figure] = field(default_factory=list)
    without_evidence: list[str] = field(default_factory=list)

    async def add(self, kind: str, task: Task, expected: list[list[int]] | None = None) -> None:
        """Every way against `expected`, which is transformers' answer; without it, against one engine, one prompt at a time."""
        outcomes = await all_ways(task)
        peer = "one engine, one prompt at a time" if expected is None else "transformers generate, fp32"
        self.figures += figures_of(kind, outcomes[0].tokens if expected is None else expected, outcomes, peer)
        self.without_evidence += [f"{kind}: {outcome.way}" for outcome in outcomes if outcome.evidence <= 0]

    @property
    def wrong(self) -> list[str]:
        return [figure.name for figure in self.figures if figure.value != figure.goal]


async def main() -> int:
    folder = ensure_model("smollm2-135m-instruct", say)
    prompts = encode_all(Tokenizer.load(folder).encode)
    torch.manual_seed(0)
    say(f"{len(prompts)} prompts of {min(map(len, prompts))} to {max(map(len, prompts))} tokens")
    # Every second prompt, the longest among them: seeds are about noise, and greedy has been over all lengths.
    some = prompts[1::2]
    sections = Sections()
    expected = reference.greedy(folder, prompts, NUM_TOKENS)
    await sections.add("float32, greedy", Task(folder, prompts, GREEDY, NUM_TOKENS, FLOAT32), expected)
    await sections.add("float32, sampled with a seed", Task(folder, some, SAMPLED, NUM_TOKENS, FLOAT32))
    await sections.add("int8, the default, greedy", Task(folder, prompts, GREEDY, NUM_TOKENS))
    await sections.add("int8, the default, sampled with a seed", Task(folder, some, SAMPLED, NUM_TOKENS))
    figures = [*sections.figures, await chi_square(folder, prompts[1])]
    write("equality", figures, prompt_tokens=[len(prompt) for prompt in prompts])
    say(f"wrong: {sections.wrong or 'none'}; ways without evidence: {sections.without_evidence or 'none'}")
    return 1 if sections.wrong or sections.without_evidence else 0


if __name__ == "__main__":
    parser_of("tests.equality", __doc__).parse_args()
    sys.exit(asyncio.run(main()))
