"""Lookahead decoding: drafts without a model and without a text to copy, from the model's draws after rejected tokens.

    drafted    a  b  c  d      verified in one step after the root
    drawn      x  y  z  u  v   x is the next token; y, z, u, v were drawn after wrong tokens, and are the next step's draft

The draws of one step are the draft of the next: a Jacobi iteration whose fixed point is what the model draws one by one (Santilli
et al. 2023, "Accelerating Transformer Inference for Translation via Parallel Decoding"). Tokens of successive steps that are one
position further each time are n-grams in the model's own words; they are pooled, and one that begins with the last token is a
draft too (Fu et al. 2024, "Break the Sequential Dependency of LLM Inference Using Lookahead Decoding"). There a step also
computes rows that are no draft, to fill the pool; here only rejected rows fill it, also those of other proposers' drafts."""

from __future__ import annotations

from collections.abc import Sequence as Sequence_
from dataclasses import replace
from weakref import ReferenceType, WeakKeyDictionary, ref

from torch import Tensor

from pdmesh.engine.scheduler.sequence import Sequence
from pdmesh.engine.speculation.acceptance_rate import Calibration
from pdmesh.engine.speculation.draft import NOTHING, ROOT, Draft, Verified
from pdmesh.engine.speculation.ngrams.token_history import Branch, tree
from pdmesh.engine.speculation.policy import TRIAL_STEPS, TRIAL_TOKENS
from pdmesh.engine.speculation.proposer import Ask

NAME = "lookahead"
_NGRAM = 4  # tokens
_WINDOW = TRIAL_TOKENS  # tokens of a trajectory
_MOST_POOLED = 1024  # most n-grams of a sequence
_POOLED, _DRAWN = 0, _NGRAM - 1  # first buckets of tokens from the pool and from the trajectory: one bucket for each depth
_PRIORS = (0.15, 0.3, 0.3, 0.1, 0.2, 0.2, 0.2)

# A trial: one sequence has its whole window verified for some steps, although its expected gain is small.
_TRIAL_SUCCESS = 4  # accepted tokens
_SHORTEST_PAUSE, _LONGEST_PAUSE = 128, 1 << 14  # steps; doubled while trials do not succeed


class Lookahead:
    """Propose by lookahead. Its drafts come from verified drafts: where they do not pay, it has drafts only in its trials."""

    name = NAME
    is_free = True
    wants_hidden = False
    learns = True

    def __init__(self) -> None:
        self._calibration = Calibration(_PRIORS)
        self._trials = _Trials()
        self._threads: WeakKeyDictionary[Sequence, _Thread] = WeakKeyDictionary()

    def propose(self, asks: Sequence_[Ask]) -> list[Draft]:
        tried = self._trials.next(asks)
        return [self._trial(ask) if ask is tried else self._draft(ask) for ask in asks]

    def learn(self, sequence: Sequence, verified: Verified, hidden: Tensor | None) -> None:
        thread = self._thread(sequence)
        thread.judge(verified, self._calibration)
        thread.go_on(verified, sequence.output)
        if len(verified.draft):
            self._trials.saw(sequence, len(verified.kept))

    def _thread(self, sequence: Sequence) -> _Thread:
        thread = self._threads.get(sequence)
        if thread is None:
            thread = self._threads[sequence] = _Thread()
        return thread

    def _trial(self, ask: Ask) -> Draft:
        tokens = self._thread(ask.sequence).window(ask.sequence.output)[: min(ask.max_depth, ask.max_tokens)]
        chances = self._calibration.chances[_DRAWN : _DRAWN + len(tokens)]
        return replace(Draft.chain(tokens, chances, NAME), is_trial=True)

    def _draft(self, ask: Ask) -> Draft:
        pooled, drawn = self._thread(ask.sequence).guess(ask.sequence.output)
        if not pooled and not drawn:
            return NOTHING
        first = self._branch(pooled, _POOLED, 1.0, ask)
        if pooled and drawn and pooled[0] == drawn[0]:
            other = self._branch(drawn, _DRAWN, 1.0, ask)
            first, other = max(first, other, key=_expected), ([], [])
        else:
            other = self._branch(drawn, _DRAWN, 1.0 - first[1][0] if first[1] else 1.0, ask)
        return tree(first, other, ask.max_tokens, NAME)

    def _branch(self, tokens: Sequence_[int], bucket: int, most: float, ask: Ask) -> Branch:
        """Return the branch as far as the tokens are likely enough; `most`: the first token's largest chance beside another
        branch."""
        chances: list[float] = []
        likely = 1.0
        for depth in range(min(len(tokens), ask.max_depth, ask.max_tokens)):
            chance = self._calibration.chance(bucket + depth)
            chance = chance if depth else min(chance, most)
            likely *= chance
            if likely < ask.least_chance:
                break
            chances.append(chance)
        return tokens[: len(chances)], chances


class _Thread:
    """Hold the state of one sequence: its trajectory, and its pool of n-grams.

    `_ends[place]`: the n-gram that ends with the last step's draw for this place of the output, each of its tokens from a step
    later than the one before it.
    """

    __slots__ = ("_drawn", "_ends", "_guessed", "_num_known", "_pool")

    def __init__(self) -> None:
        self._pool: dict[int, tuple[int, ...]] = {}  # by first token: the rest of the latest n-gram that begins with it
        self._ends: dict[int, tuple[int, ...]] = {}
        self._drawn: tuple[int, ...] = ()  # the trajectory: tokens for the positions after the first `_num_known`
        self._num_known = 0
        self._guessed: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())

    def guess(self, output: list[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the next tokens by the pool, and by the trajectory."""
        if len(output) != self._num_known:
            self._drawn, self._num_known = (), len(output)
        self._guessed = self._pool.get(output[-1], ()), self._drawn
        return self._guessed

    def window(self, output: list[int]) -> list[int]:
        """Return a full trajectory; where there are no draws, it continues by the pool, else with any token."""
        pooled, drawn = self.guess(output)
        tokens = list(drawn or pooled)
        while len(tokens) < _WINDOW:
            tokens += self._pool.get(tokens[-1] if tokens else output[-1], output[-1:])
        return tokens[:_WINDOW]

    def judge(self, verified: Verified, calibration: Calibration) -> None:
        """Compare the predictions with the new tokens, whichever proposer's draft was verified, if any was."""
        pooled, drawn = self._guessed
        if pooled or drawn:
            new_tokens = verified.new_tokens if len(verified.draft) else verified.draws
            _judge(pooled, new_tokens, _POOLED, calibration)
            _judge(drawn, new_tokens, _DRAWN, calibration)
            self._guessed = ((), ())

    def go_on(self, verified: Verified, output: list[int]) -> None:
        """Make the draws the next trajectory, unless tokens that a grammar forced lie between it and the output's end."""
        num_new = len(verified.rows) if len(verified.draft) else 1
        place, self._num_known = self._num_known or len(output) - num_new, len(output)
        last_ends, self._ends, self._drawn = self._ends, {}, ()
        if len(verified.draft) and place + num_new == len(output):
            self._collect(verified, place, last_ends)
            for row in range(num_new):  # new tokens serve like those of steps
                self._pool_ngram(tuple(output[max(0, place + row + 1 - _NGRAM) : place + row + 1]))
            self._drawn = _trajectory(verified)

    def _collect(self, verified: Verified, place: int, last_ends: dict[int, tuple[int, ...]]) -> None:
        """Collect the n-grams that end with the draws after draft tokens. `place`: that of the first draw."""
        draft = verified.draft
        for token_id, depth, draw in zip(draft.token_ids, draft.depths, verified.draws[1:], strict=True):
            behind = last_ends.get(place + depth - 1, ())[1 - _NGRAM :]
            ngram = (*(behind if behind[-1:] == (token_id,) else (token_id,)), draw)
            self._ends.setdefault(place + depth, ngram)
            self._pool_ngram(ngram)
            self._pool_ngram(ngram[-2:])

    def _pool_ngram(self, ngram: tuple[int, ...]) -> None:
        """Replace the entry of its first token, unless that is the same and longer."""
        pool, first, rest = self._pool, ngram[0], ngram[1:]
        longer = pool.pop(first, ())
        pool[first] = longer if longer[: len(rest)] == rest else rest  # the latest is last
        if len(pool) > _MOST_POOLED:
            del pool[next(iter(pool))]


class _Trials:
    """Schedule trials of drafts that do not seem to pay: for a few steps, by one sequence, and more rarely after each vain
    trial."""

    def __init__(self) -> None:
        self._pause = self._wait = _SHORTEST_PAUSE
        self._left = self._kept = 0
        self._sequence: ReferenceType[Sequence] | None = None

    def next(self, asks: Sequence_[Ask]) -> Ask | None:
        """Return the sequence whose whole window is verified in this step, if any."""
        if self._left:
            self._left -= 1
            if not self._left:
                self._end()
        else:
            self._wait -= 1
            if self._wait <= 0 and asks and asks[0].may_try:
                self._left, self._kept, self._sequence = TRIAL_STEPS, 0, ref(asks[0].sequence)
        if not self._left:
            return None
        sequence = self._sequence() if self._sequence else None
        return next((ask for ask in asks if ask.sequence is sequence), None)

    def saw(self, sequence: Sequence, num_kept: int) -> None:
        if self._left and self._sequence is not None and self._sequence() is sequence:
            self._kept += num_kept

    def _end(self) -> None:
        self._pause = _SHORTEST_PAUSE if self._kept >= _TRIAL_SUCCESS else min(2 * self._pause, _LONGEST_PAUSE)
        self._wait = self._pause


def _judge(guess: tuple[int, ...], new_tokens: tuple[int, ...], bucket: int, calibration: Calibration) -> None:
    for depth, (guessed, token_id) in enumerate(zip(guess, new_tokens, strict=False)):
        calibration.saw(bucket + depth, guessed == token_id)
        if guessed != token_id:
            return


def _trajectory(verified: Verified) -> tuple[int, ...]:
    """Return the draws after the wrong tokens beside the last new one: one position further each."""
    draft, drawn = verified.draft, []
    at = verified.kept[-1] if verified.kept else ROOT
    for index, parent in enumerate(draft.parents):
        if parent == at:
            drawn.append(verified.draws[index + 1])
            at = index
    return tuple(drawn[:_WINDOW])


def _expected(branch: Branch) -> float:
    """Return the expected number of accepted tokens."""
    expected, likely = 0.0, 1.0
    for chance in branch[1]:
        likely *= chance
        expected += likely
    return expected


def make(_parts: object) -> Lookahead:
    """Return a proposer for an engine; it needs none of the parts."""
    return Lookahead()
