"""`make bench-spec`: speculation: all parts, or those that `--only` names. Each adds its figures to those of the others in
benchmarks/results/spec.json as soon as it is through. The machine should have nothing else to do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from benchmarks.harness import Figure, Measured, Suite, say
from benchmarks.spec import forced, gain, safety
from benchmarks.spec.runs import Bench, Task
from benchmarks.spec.texts import varied_prompts
from benchmarks.spec.workloads import WORKLOADS, Job, jobs
from pdmesh.engine.speculation.draft_heads.weights import FILE
from pdmesh.engine.speculation.setup import heads_path
from pdmesh.models.registry import DEFAULT_MODEL, ensure_model
from pdmesh.text.grammar import GrammarCompiler
from pdmesh.text.tokenizer import Tokenizer
from tests.equality import speculation
from tests.equality.speculation import Guess

NUM_JOBS = 36
"""Of each workload: so many are different texts."""
NUM_OTHER = 24
"""Of the workloads that are drawn in other ways: so many are compared token by token."""
SELF_DRAFT_LAYERS = 24
SUITE = Suite("spec", ("tokens", "mesh", "curve", "forced", "gain", "safety", "arriving", "threshold", "study"))


@dataclass(frozen=True)
class Parts:
    """What the parts share. `quick`: to see that all work, in short. `num_prompts`: of the varied ones, those that are compared
    token by token."""

    folder: Path
    num_prompts: int
    quick: bool

    @cached_property
    def bench(self) -> Bench:
        return Bench(self.folder)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return Tokenizer.load(self.folder)

    @cached_property
    def workloads(self) -> Mapping[str, Sequence[Task]]:
        return {kind: self._tasks(kind) for kind in WORKLOADS}

    def _tasks(self, kind: str) -> list[Task]:
        return [self._task(job) for job in jobs(kind, 2 if self.quick else NUM_JOBS, self.tokenizer.encode)]

    def _task(self, job: Job) -> Task:
        encode = self.tokenizer.encode
        grammar = self._grammars.compile("json_schema", job.schema) if job.schema else None
        return Task(tuple(encode(job.prompt)), job.params, grammar, tuple(encode(job.right)))

    @cached_property
    def _grammars(self) -> GrammarCompiler:
        config = self.bench.loaded.config
        return GrammarCompiler(self.tokenizer.to_json(), config.vocab_size, config.eos_token_ids)

    @cached_property
    def prompts(self) -> list[tuple[int, ...]]:
        """Of all kinds, however few are wanted."""
        prompts = varied_prompts()
        wanted = prompts[:: max(1, len(prompts) // (8 if self.quick else self.num_prompts))]
        return [tuple(self.tokenizer.encode(prompt.text)) for prompt in wanted]

    @cached_property
    def guesses(self) -> list[Guess]:
        """Proposers and combinations whose worth is measured; heads only where some are trained."""
        names = ("auto", "prompt_lookup", "retrieval", "lookahead", "prompt_lookup,retrieval")
        found = [Guess(name, name, {}) for name in names]
        found.append(Guess("self_draft", "self_draft", {"self_draft_layers": SELF_DRAFT_LAYERS}))
        if heads_path(self.bench.config) is None:
            say(f"heads: skipped: there is no {FILE} beside the model; make train-heads")
            return found
        return [*found, Guess("heads", "heads", {})]

    @property
    def equal_guesses(self) -> list[Guess]:
        """And a draft model. No other model of the same vocabulary is at hand: as fast as the target, it is worth nothing, and
        nearly always right."""
        return [*self.guesses, Guess("draft_model (the model itself)", "draft_model", {"draft_model": str(self.folder)})]

    @property
    def equal_kinds(self) -> dict[str, Sequence[Task]]:
        kinds = ("penalties, min-p", "logprobs", "JSON schema")
        return speculation.kinds_of(self.prompts, {kind: self.workloads[kind][:NUM_OTHER] for kind in kinds})

    def rounds(self, count: int) -> int:
        return 1 if self.quick else count

    def figures(self, part: str) -> Measured:
        if part == "mesh":
            return self._mesh_figures()
        measures: Mapping[str, Callable[[], Iterable[Figure]]] = {
            "tokens": lambda: speculation.engine_figures(self.bench, self.equal_kinds, self.equal_guesses),
            "curve": lambda: safety.cost_figures(self.bench),
            "forced": lambda: forced.forced_figures(self.bench, self._forced_prompts, self.rounds(3)),
            "gain": lambda: gain.gain_figures(self.bench, self.workloads, self.guesses),
            "safety": lambda: safety.safety_figures(self.bench, self.workloads, self.rounds(5)),
            "arriving": lambda: safety.arriving_figures(self.bench, self.workloads["mixed"], self.rounds(5)),
            "threshold": lambda: safety.threshold_figures(self.bench, self.workloads["mixed"], self.rounds(3)),
            "study": lambda: gain.study_figures(self.bench, self.workloads, gain.guesses_to_study(self.guesses)),
        }
        return list(measures[part]())

    @property
    def _forced_prompts(self) -> list[tuple[int, ...]]:
        return [task.prompt for task in self.workloads["prose"][:2]]

    async def _mesh_figures(self) -> list[Figure]:
        # Lookahead guesses from guesses that were verified: prompt lookup's.
        guesses = [guess for guess in self.equal_guesses if guess.name not in ("lookahead", "prompt_lookup,retrieval")]
        guesses.append(Guess("prompt_lookup,lookahead", "prompt_lookup,lookahead", {}))
        return [figure async for figure in speculation.mesh_figures(self.folder, self.prompts, guesses, self.bench)]


def main() -> None:
    parser = SUITE.parser(__doc__)
    parser.add_argument("--prompts", type=int, default=200, help="so many of the 200 varied prompts, in tokens and mesh")
    arguments, names = SUITE.arguments(parser)
    shared = Parts(ensure_model(DEFAULT_MODEL, say), max(1, arguments.prompts), arguments.quick)
    SUITE.main(names, shared.figures, quick=arguments.quick)


if __name__ == "__main__":
    main()
