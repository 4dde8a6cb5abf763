"""Item 6: drafts cost what their rows cost, and nothing else.

Acceptance is forced to α with drafts of k tokens. A step then gives 1 + α + … + α^k tokens and takes t(k + 1), so the speed-up
can be that sum × t(1) ÷ t(k + 1). Both times are those of the computation alone, taken in the very steps whose speed-up is
measured: same contexts, same moment. What the speed-up lacks is drafting, choosing, planning and book-keeping.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from statistics import median

from torch import Tensor

from benchmarks.harness import Figure, say
from benchmarks.spec.runs import Bench, Task, answer, guessed, of_length
from pdmesh.engine.engine import Engine
from pdmesh.engine.kv_cache.events import LayerReadiness
from pdmesh.engine.runner.model_runner import ModelRunner, SampledOutput
from pdmesh.engine.scheduler.scheduler import ScheduledSequence, SchedulerOutput
from pdmesh.engine.scheduler.sequence import Sequence as EngineSequence
from pdmesh.engine.speculation.draft import NOTHING, Draft, Verified
from pdmesh.engine.speculation.proposer import Ask
from pdmesh.sampling_params import SamplingParams

# Proposers that know the answer: what speculation is worth at a given acceptance, and that wrong guesses change nothing.


GOLDEN = (math.sqrt(5) - 1) / 2
LEAST_CHANCE = 0.001
"""What is said of a wrong token: better than no draft, and worse than anybody's."""


class Scripted:
    """Proposes what each request (by id, a number) will answer; each token is right with probability `right`.

    `length` tokens a draft; who is to verify all of them gives the engine the same `draft_length`. How many of a draft's first
    tokens are right is spread as evenly over the drafts as can be, so that a short run has the acceptance that was asked for.
    """

    name = "scripted"
    is_free = True
    wants_hidden = False
    learns = False

    def __init__(self, right: float, length: int, vocab_size: int) -> None:
        self.right, self.length = right, length
        self.answers: Sequence[Sequence[int]] = ()
        self._vocab_size = vocab_size
        self._at = 0.5

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        return [self._draft(ask) for ask in asks]

    def learn(self, sequence: EngineSequence, verified: Verified, hidden: Tensor | None) -> None:
        """It knows already."""

    def _draft(self, ask: Ask) -> Draft:
        request, start = ask.sequence.group.request, len(ask.sequence.output)
        answer = self.answers[int(request.request_id)][start : start + min(self.length, ask.max_depth)]
        self._at = (self._at + GOLDEN) % 1.0
        num_right = right_run(self.right, self._at)
        tokens = [token if place < num_right else (token + 1) % self._vocab_size for place, token in enumerate(answer)]
        chance = max(self.right, LEAST_CHANCE)
        return Draft.chain(tokens, [chance] * len(tokens), self.name) if tokens else NOTHING


def right_run(right: float, at: float) -> float:
    """How many tokens in a row are right before the first that is not, `at` in [0, 1) of all drafts ordered by that number,
    where each token is so with probability `right`: n or more in right^n of them."""
    if right in (0.0, 1.0):
        return math.inf if right else 0.0
    return math.floor(math.log(1.0 - at) / math.log(right))


NUM_TOKENS = 241
"""One with the prompt; the rest is a multiple of every draft and its one token more, so that no draft is cut short at α = 1."""
ACCEPTANCES = (0.5, 0.8, 1.0)
LENGTHS = (2, 4, 7)


class TimedRunner:
    """Stands before an engine's runner: seconds of each step, by tokens that it computed."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self.seconds: dict[int, list[float]] = {}

    def copy_blocks(self, pieces: list[ScheduledSequence]) -> None:
        self.runner.copy_blocks(pieces)

    def run(
        self, plan: SchedulerOutput, signal: LayerReadiness | None = None, *, keep_hidden: bool = True
    ) -> dict[EngineSequence, list[SampledOutput]]:
        started_s = time.perf_counter()
        draws = self.runner.run(plan, signal, keep_hidden=keep_hidden)
        self.seconds.setdefault(plan.num_tokens, []).append(time.perf_counter() - started_s)
        return draws


@contextmanager
def timed(engine: Engine) -> Iterator[TimedRunner]:
    """Its steps are, meanwhile. Nothing else of an engine says what the computation takes, without planning."""
    timer = TimedRunner(engine._runner)
    engine._runner = timer  # type: ignore[assignment]
    yield timer
    engine._runner = timer.runner


def forced_figures(bench: Bench, prompts: Sequence[tuple[int, ...]], rounds: int) -> list[Figure]:
    """For each acceptance and length the share of the possible speed-up that is reached."""
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    tasks, plain = [Task(prompt, params) for prompt in prompts], bench.engine()
    figures: list[Figure] = []
    for right in ACCEPTANCES:
        for length in LENGTHS:
            figures += _forced(bench, plain, tasks, right, length, rounds)
    return figures


def _forced(bench: Bench, plain: Engine, tasks: list[Task], right: float, length: int, rounds: int) -> list[Figure]:
    scripted = Scripted(right, length, bench.loaded.config.vocab_size)
    engine = bench.engine([scripted], **of_length(length))
    reached, allowed = [], []
    for task in tasks * rounds:
        with timed(plain) as slow_timer, timed(engine) as fast_timer:
            slow = answer(plain, [task])
            scripted.answers = [slow.outputs[0].token_ids]
            fast = answer(engine, [task])
            again = answer(plain, [task])
        assert slow.outputs == fast.outputs == again.outputs, "speculation changed a token"
        reached.append((slow.decode_s + again.decode_s) / 2 / fast.decode_s)
        cost = median(fast_timer.seconds[length + 1]) / median(slow_timer.seconds[1])
        allowed.append(expected(right, length) / cost)
    return _figures(right, length, reached, allowed, _tokens_per_row(engine))


def _figures(right: float, length: int, reached: list[float], allowed: list[float], tokens_per_row: float) -> list[Figure]:
    share = median(got / most for got, most in zip(reached, allowed, strict=True))
    kind = f"acceptance {right}, draft of {length}"
    possible, wanted = round(median(allowed), 3), round(expected(right, length), 3)
    say(f"{kind}: {median(reached):.2f}x of {possible:.2f}x; {tokens_per_row:.2f} tokens a step, {wanted:.2f} expected")
    return [
        Figure(f"share of the possible speed-up, {kind}", round(share, 3), "x", "higher", 0.9),
        Figure(f"speed-up, {kind}", round(median(reached), 3), "x", "higher", None, possible),
        Figure(f"tokens of a step, {kind}", round(tokens_per_row, 3), "tokens", "higher", None, wanted),
    ]


def _tokens_per_row(engine: Engine) -> float:
    stats = guessed(engine)
    return stats.num_tokens / stats.num_rows


def expected(right: float, length: int) -> float:
    """Tokens of a step: 1 + a + a² + … + a^k."""
    return sum(right**place for place in range(length + 1))
