"""An engine's steps without an engine: the test says what a step takes, what asking takes, and how often guesses are right."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Sequence_

from torch import Tensor

from pdmesh.engine.runner.model_runner import SampledOutput
from pdmesh.engine.sampling.sampler import SampledToken
from pdmesh.engine.scheduler.scheduler import ScheduledSequence, SchedulerOutput
from pdmesh.engine.scheduler.sequence import Sequence
from pdmesh.engine.speculation.cost_curve import CostCurve
from pdmesh.engine.speculation.draft import NOTHING, Draft, Verified
from pdmesh.engine.speculation.proposer import Ask
from pdmesh.engine.speculation.speculator import Bounds, Speculator
from tests.engine.speculation.copying import decoding

VOCAB_SIZE = 1000
MAX_DEPTH = 8
_LENGTH = 1000  # tokens of an output
_BUDGET = 4096
NOISE = 0.05


class Clock:
    """Nanoseconds, as they are spent."""

    def __init__(self) -> None:
        self.now_ns = 0

    def __call__(self) -> int:
        return self.now_ns

    def spend(self, seconds: float) -> None:
        self.now_ns += round(1e9 * seconds)


class Liar:
    """Guesses `depth` tokens, each right with the chance `right`, and says that it is `claimed`. Asking takes `price_s`."""

    wants_hidden = False
    learns = False

    def __init__(
        self, right: float, claimed: float, *, price_s: float = 0.0, is_free: bool = True, depth: int = MAX_DEPTH
    ) -> None:
        self.name = "liar"
        self.is_free = is_free
        self.right, self.claimed, self.price_s, self.depth = right, claimed, price_s, depth
        self.clock = Clock()
        self.num_calls = 0
        self._random = random.Random(5)

    def propose(self, asks: Sequence_[Ask]) -> list[Draft]:
        self.clock.spend(self.price_s)
        self.num_calls += 1
        return [self._draft(ask) for ask in asks]

    def learn(self, sequence: Sequence, verified: Verified, hidden: Tensor | None) -> None:
        """It never does."""

    def _draft(self, ask: Ask) -> Draft:
        size, likely = 0, self.claimed
        while size < min(self.depth, ask.max_depth, ask.max_tokens) and likely >= ask.least_chance:
            size, likely = size + 1, likely * self.claimed
        at = len(ask.sequence.output)
        tokens = [(token_at(at + i) + (self._random.random() >= self.right)) % VOCAB_SIZE for i in range(size)]
        return Draft.chain(tokens, [self.claimed] * size, self.name)


class Machine:
    """Sequences that decode, and a speculator that sees only what steps take: `true_s(rows)`, with some noise; and `handling_s`
    besides, if they or the ones before have drafts. Other steps of the same sequences repeat their plan."""

    def __init__(
        self,
        proposers: Sequence_[Liar],
        curve: CostCurve,
        true_s: Callable[[int], float],
        num_sequences: int,
        *,
        context_s: float = 0.0,
        prompt: int = 1,
        handling_s: float = 0.0,
    ) -> None:
        self.clock = Clock()
        for proposer in proposers:
            proposer.clock = self.clock
        bounds = Bounds(MAX_DEPTH, _BUDGET, 1 << 20, vocab_size=VOCAB_SIZE)
        self.speculator = Speculator(proposers, curve, bounds, clock_ns=self.clock)
        self.true_s, self.context_s, self.handling_s = true_s, context_s, handling_s
        self._plan: SchedulerOutput | None = None  # the last step's, if it had no drafts
        self._prompt, self._random = [1] * prompt, random.Random(7)
        self.running = [self._begin(at) for at in range(num_sequences)]
        self.num_tokens = 0

    def run(self, num_steps: int) -> float:
        """Tokens per second of these steps."""
        num_tokens, started_ns = self.num_tokens, self.clock.now_ns
        for _ in range(num_steps):
            self.step()
        return 1e9 * (self.num_tokens - num_tokens) / (self.clock.now_ns - started_ns)

    def plain(self) -> float:
        """Tokens per second of steps without drafts."""
        return len(self.running) / self._took_s(len(self.running))

    def step(self) -> None:
        started_ns = self.clock.now_ns
        drafts = self.speculator.draft(self.running, has_waiting=False)
        was_drafted = self._plan is None
        plan = self._planned(drafts)
        draws = {piece.sequence: [_draw(piece)] for piece in plan.pieces}
        for sequence, [draw] in draws.items():
            sequence.output += [token.token_id for token in draw.tokens]
            sequence.num_computed = sequence.num_tokens - 1
            self.num_tokens += len(draw.tokens)
        took_s = self._took_s(plan.num_tokens) * self._random.uniform(1 - NOISE, 1 + NOISE)
        self.clock.spend(took_s + (self.handling_s if drafts or was_drafted else 0.0))
        self.speculator.learn(plan, draws, started_ns, round(1e9 * took_s), 0)
        self.running = [self._begin() if len(each.output) > _LENGTH else each for each in self.running]

    def _planned(self, drafts: Mapping[Sequence, Draft]) -> SchedulerOutput:
        plan = self._plan
        if plan is not None and not drafts and plan.sequences == self.running:
            plan.num_repeats += 1
            return plan
        plan = SchedulerOutput(_BUDGET)
        for sequence in self.running:
            plan.add(ScheduledSequence(sequence, 1, (), drafts.get(sequence, NOTHING)))
        self._plan = None if drafts else plan
        return plan

    def _took_s(self, num_rows: int) -> float:
        return self.true_s(num_rows) + self.context_s * sum([sequence.num_tokens for sequence in self.running])

    def _begin(self, num_done: int = 0) -> Sequence:
        sequence = decoding(self._prompt, [token_at(at) for at in range(1 + num_done)])
        sequence.num_to_restore = len(self._prompt)
        sequence.num_computed = sequence.num_tokens - 1
        return sequence


def token_at(place: int) -> int:
    """What the model draws there, whatever came before."""
    return place * 7 % VOCAB_SIZE


def _draw(piece: ScheduledSequence) -> SampledOutput:
    at = len(piece.sequence.output)
    verified = Verified(piece.draft, (token_at(at), *(token_at(at + depth) for depth in piece.draft.depths)))
    return SampledOutput(0, tuple([SampledToken(token_id, None) for token_id in verified.new_tokens]), verified)
