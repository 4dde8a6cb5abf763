"""Sequences, which the scheduler schedules, and the requests to which they belong.

    request, n = 3       trunk (choices 0, 1, 2)  ──┬── branch (choice 0)
                         computes the prompt once   ├── branch (choice 1)      branches share the trunk's blocks
                                                    └── branch (choice 2)

A request with one unfinished choice has no trunk: its only sequence is the branch from the start, its history included.
"""

from __future__ import annotations

import enum
from typing import Any

from pdmesh.engine.outputs import StartClock, TokenLogprobs
from pdmesh.engine.request import EndRule, EngineRequest, Pooling
from pdmesh.engine.sampling.grammar import Grammar, Matcher, MatcherTree


class Sequence:
    """Hold tokens and the blocks of their KV: one choice, or the prompt that several choices share until they part.

    `num_computed` chases `num_tokens`; only what is computed may be read or published. Compared by identity.
    """

    __slots__ = (
        "__weakref__",
        "_is_read",
        "_matchers",
        "_num_taken",
        "block_hashes",
        "block_ids",
        "choices",
        "group",
        "is_exact",
        "is_private",
        "num_cached",
        "num_computed",
        "num_paced_steps",
        "num_published",
        "num_rounded",
        "num_to_restore",
        "num_unreported",
        "output",
        "paced_from_ns",
        "paced_from_token",
        "prompt_logprobs",
        "state_sum",
        "was_preempted",
    )  # fmt: skip

    def __init__(self, group: SequenceGroup, choices: tuple[int, ...], output: list[int]) -> None:
        self.group = group
        self.choices = choices
        self.output = output
        request = group.request
        self._is_read = request.sampling.prompt_logprobs is not None or request.pooling is Pooling.MEAN
        self.block_ids: list[int] = []
        self.block_hashes: list[bytes] = []  # hashes of the first full blocks, computed on demand
        self.num_computed = 0
        self.num_cached = 0  # tokens that the prefix cache served when it last got its blocks
        self.num_published = 0  # full blocks that were offered to the prefix cache
        self.num_rounded = 0  # those of the cached tokens whose KV a tier has rounded
        self.is_exact = True  # its KV neither is rounded nor is computed from such
        self.is_private = False  # it publishes no blocks: its KV is not exact, and came from another worker
        self.num_unreported = 0  # last output tokens, which a grammar forced before the first step here
        self.num_to_restore = self.num_tokens  # first tokens that were known on arrival, or computed before a preemption
        self.was_preempted = False
        self.paced_from_ns = 0  # start of its TPOT schedule (tpot_limiter.py), 0: none yet; and its output tokens then
        self.paced_from_token = 0
        self.num_paced_steps = 0  # steps since then, including the step that is being planned
        self.prompt_logprobs: list[TokenLogprobs] = []  # of the prompt's second token and those after it, as far as computed
        self.state_sum: Any = 0.0  # pooling: sum of the hidden states of what is computed, a tensor (runner/prompt_outputs.py)
        self._matchers: MatcherTree | None = None  # created on demand; it has taken the first `_num_taken` output tokens
        self._num_taken = 0

    @property
    def turn(self) -> tuple[int, int]:
        """Return the scheduling order: first come, first served; among the choices of a request the lower first."""
        return self.group.arrival, self.choices[0]

    @property
    def num_tokens(self) -> int:
        return len(self.group.request.prompt) + len(self.output)

    @property
    def num_remaining(self) -> int:
        """Return the number of known tokens that are not computed: 1 while it decodes."""
        return self.num_tokens - self.num_computed

    @property
    def num_to_prefill(self) -> int:
        """Return the number of tokens that are not computed and are no new output (neither drawn nor forced here)."""
        return max(0, self.num_to_restore - self.num_computed)

    @property
    def is_decoding(self) -> bool:
        """Return whether only the token that was drawn last is not computed."""
        return self.num_remaining == 1 and bool(self.output)

    @property
    def is_going_on(self) -> bool:
        """Return whether only new output is not computed: the token drawn last, and tokens that a grammar forced after it."""
        return bool(self.output) and not self.num_to_prefill

    @property
    def needs_prompt_rows(self) -> bool:
        """Return whether all tokens of its prompt need a row of the model's output: for a mean of their states, or for the
        prompt's log-probabilities. A prefix with cached KV has none, so such a prompt is computed as a whole."""
        return self._is_read and not self.output

    @property
    def choices_to_draw(self) -> tuple[int, ...]:
        """Return the choices that draw when the last known token is computed. A choice with history first becomes a sequence of
        its own and continues alone."""
        if len(self.choices) == 1:
            return self.choices
        return tuple(choice for choice in self.choices if not self.group.history(choice))

    def tokens(self, start: int, end: int) -> tuple[int, ...]:
        """Return the token ids at positions `start` to `end` (exclusive) of prompt and output."""
        prompt = self.group.request.prompt
        behind = len(prompt)
        return prompt[start:end] + tuple(self.output[max(0, start - behind) : max(0, end - behind)])

    def matcher(self) -> Matcher | None:
        """Return the grammar's matcher after the present output; None without a grammar."""
        grammar = self.group.request.grammar
        if grammar is None:
            return None
        matchers = self._matchers or MatcherTree(self._first_matcher(grammar))
        for token_id in self.output[self._num_taken :]:
            matchers.take(token_id)
        self._matchers, self._num_taken = matchers, len(self.output)
        return matchers.here

    def matcher_behind(self, guessed: tuple[int, ...]) -> Matcher:
        """Return the grammar's matcher after the present output and the tokens `guessed`. Callers must not advance it."""
        self.matcher()
        assert self._matchers is not None, "only asked of a request with a grammar"
        return self._matchers.behind(guessed)

    def _first_matcher(self, grammar: Grammar) -> Matcher:
        """Return the matcher after the history if the caller has replayed it, else at the beginning."""
        matchers, choice = self.group.request.matchers, self.choices[0]
        ready = matchers[choice] if matchers and len(self.choices) == 1 else None
        if ready is None:
            return grammar.matcher()
        self._num_taken = len(self.group.history(choice))
        return ready.copy()

    def forced_token(self) -> int | None:
        """Return the next token where it needs no model: the grammar leaves no choice, and no log-probabilities are requested."""
        if self.group.request.grammar is None or self.group.request.sampling.logprobs is not None:
            return None
        matcher = self.matcher()
        return matcher.forced if matcher else None

    @property
    def lost_grammar(self) -> bool:
        """Return whether the output was cut short because its grammar could not be followed any further."""
        return self._matchers is not None and self._matchers.here.failed

    def part(self) -> list[Sequence]:
        """Return the trunk's choices as sequences of their own, with the same tokens computed. The caller accounts for the shared
        blocks."""
        branches = [Sequence(self.group, (choice,), list(self.group.history(choice))) for choice in self.choices]
        for branch in branches:
            branch.inherit(self)
        return branches

    def inherit(self, other: Sequence) -> None:
        """Take over another sequence's blocks and their state. This sequence begins with all tokens of those blocks."""
        self.block_ids = list(other.block_ids)
        self.block_hashes = list(other.block_hashes)
        self.num_computed = other.num_computed
        self.num_cached = other.num_cached
        self.num_published = other.num_published
        self.num_rounded, self.is_exact, self.is_private = other.num_rounded, other.is_exact, other.is_private


class Phase(enum.Enum):
    """Name the state of a request's blocks."""

    RESERVED = "reserved"  # another worker may write KV into them; not scheduled
    ACTIVE = "active"  # its sequences wait or run
    HELD = "held"  # prefilled and read by a push until release(); not scheduled


class SequenceGroup:
    """Hold one request in the engine, with the sequences of its unfinished choices."""

    def __init__(
        self, request: EngineRequest, arrival: int, phase: Phase, clock: StartClock | None = None, weights_hash: str = ""
    ) -> None:
        """`weights_hash`: of the weights that compute it."""
        self.request = request
        self.weights_hash = weights_hash
        self.arrival = arrival
        self.phase = phase
        self.clock = clock  # None while reserved
        self.end_rule: EndRule | None = None  # made with its first token here
        self.retention = request.retention  # None from when its session was released on, unless it is final
        self.sequences = [self._first_sequence()]

    @property
    def num_seats(self) -> int:
        """Return the number of sequences that count against max_num_seqs. A held request only holds blocks."""
        if self.phase is Phase.HELD:
            return 0
        return sum(len(sequence.choices) for sequence in self.sequences)

    def history(self, choice: int) -> tuple[int, ...]:
        """Return the tokens of the choice that were emitted before the request came here."""
        return self.request.emitted[choice] if self.request.emitted else ()

    def _first_sequence(self) -> Sequence:
        choices = unfinished_choices(self.request)
        return Sequence(self, choices, list(self.history(choices[0])) if len(choices) == 1 else [])


def unfinished_choices(request: EngineRequest) -> tuple[int, ...]:
    """Return the choices that still need tokens, ascending."""
    return tuple(choice for choice in range(request.sampling.n) if not (request.finished and request.finished[choice]))
