"""A draft model as a proposer: a smaller model of the same vocabulary, or the first layers of the target itself.

    known     The  cat  sat ─► forward ─► on        the last known token, and tokens before it that lack KV
    drafted                 on ─► forward ─► the    then one token of each sequence at a time, all in one pass
                                  the ─► forward ─► mat

Each token is drawn as the target draws it: same parameters, penalties, grammar and noise
(pdmesh/engine/sampling/counter_rng.py). So where the models agree about what is likely they draw the same token at any
temperature. (Leviathan et al., Fast Inference from Transformers via Speculative Decoding, 2023, for the idea; there the draws
are independent.) A sequence is drafted for until the chance that all of its draft tokens are drawn falls below the caller's
threshold.

Another proposer may draft for this one (staged speculation: Spector and Re, 2023): its tokens are computed with the first pass,
and where they equal this model's own draws, their passes are saved.

KV of prompts that were prefilled elsewhere, or before this proposer was used, is missing. It is computed here, a bounded
number of tokens with each call, and until then the sequence gets no draft.
"""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Sequence as Sequence_
from dataclasses import replace

import torch
from torch import Tensor

from pdmesh.engine.loader import loader
from pdmesh.engine.request import stops
from pdmesh.engine.runner.model_runner import TokenSampler
from pdmesh.engine.sampling.grammar import Bits
from pdmesh.engine.sampling.sampler import SampleRow
from pdmesh.engine.scheduler.sequence import Sequence
from pdmesh.engine.speculation.acceptance_rate import chances
from pdmesh.engine.speculation.draft import NOTHING, Draft, Verified
from pdmesh.engine.speculation.draft_models.kv import Chunk, DraftKV, Room, batch_of
from pdmesh.engine.speculation.proposer import Ask, Proposer
from pdmesh.engine.weight_versions import ForwardModel
from pdmesh.sampling_params import SamplingParams

# The drafting of one sequence: what is computed next, what the draws are for, when it ends


class Course:
    """Hold the drafting of one sequence, at most `depth` tokens. `first`: position of the first token whose KV is missing, at
    most that of the last known one."""

    def __init__(self, ask: Ask, depth: int, first: int, eos_token_ids: frozenset[int]) -> None:
        request = ask.sequence.group.request
        self.sequence = ask.sequence
        self.depth = depth
        self.is_over = False
        self.ahead: tuple[int, ...] = ()  # the inner proposer's next tokens; computed with the next chunk
        self._least_chance = ask.least_chance
        self._first = first
        self._prompt = request.prompt
        self._params = without_logprobs(request.sampling)
        self._eos_token_ids = eos_token_ids
        self._output = list(ask.sequence.output)  # the output and the draft after it
        self._num_known = len(self._output)
        self._chances: list[float] = []
        self._cumulative = 1.0

    @property
    def is_unconstrained(self) -> bool:
        """Return whether no grammar limits the next token."""
        return self.sequence.group.request.grammar is None

    @property
    def chunk(self) -> Chunk:
        """Return the tokens to compute next, with a row of logits for each of rows()."""
        num_prompt = len(self._prompt)
        tokens = (*self._prompt[self._first :], *self._output[max(0, self._first - num_prompt) :], *self.ahead)
        return Chunk(self.sequence, self._first, tokens, 1 + len(self.ahead))

    def rows(self) -> list[SampleRow]:
        """Return the rows of the next draw, and of those after each token of the inner proposer: as the target draws them."""
        return [self._row(self.ahead[:count]) for count in range(1 + len(self.ahead))]

    def take(self, token_ids: Sequence_[int], chances: Sequence_[float]) -> None:
        """Take the draws of rows(), with their chances. A draw after an inner proposer's token counts if that token was right."""
        for index, (token_id, chance) in enumerate(zip(token_ids, chances, strict=True)):
            self._append(token_id, chance)
            if self.is_over or self.ahead[index : index + 1] != (token_id,):
                break
        self._first = len(self._prompt) + len(self._output) - 1
        self.ahead = ()

    def draft(self, proposer: str) -> Draft:
        return Draft.chain(self._output[self._num_known :], self._chances, proposer)

    def _append(self, token_id: int, chance: float) -> None:
        self._cumulative *= chance
        if self._cumulative < self._least_chance:
            self.is_over = True
            return
        self._output.append(token_id)
        self._chances.append(chance)
        self.is_over = len(self._chances) == self.depth or stops(self._params, token_id, self._eos_token_ids)

    def _row(self, ahead: tuple[int, ...]) -> SampleRow:
        return SampleRow(
            params=self._params,
            choice=self.sequence.choices[0],
            index=len(self._output) + len(ahead),
            prompt=self._prompt,
            output=[*self._output, *ahead] if ahead else self._output,
            eos_token_ids=self._eos_token_ids,
            allowed=self._allowed(ahead),
        )

    def _allowed(self, ahead: tuple[int, ...]) -> Bits | None:
        """Return the allowed tokens, found once: the step that verifies the draft needs the same ones."""
        if self.is_unconstrained:
            return None
        return self.sequence.matcher_behind((*self._output[self._num_known :], *ahead)).allowed()


def without_logprobs(params: SamplingParams) -> SamplingParams:
    """Return parameters without log-probabilities, the same object where there are none: samplers know parameters by identity."""
    return params if params.logprobs is None else replace(params, logprobs=None)


CATCH_UP_TOKENS = 256  # tokens in one call, over all sequences
LEAST_AHEAD = 0.2
"""A wrong token of the inner proposer costs a row of a pass, a right one saves a pass."""


class ModelDraft:
    """Draft with a model. open_draft_model() and self_draft() make the two kinds."""

    is_free = False
    wants_hidden = False

    def __init__(
        self,
        name: str,
        model: ForwardModel,
        kv: DraftKV,
        sampler: TokenSampler,
        room: Room,
        *,
        eos_token_ids: Collection[int],
        max_context: int,
        inner: Proposer | None = None,
        catch_up_tokens: int = CATCH_UP_TOKENS,
    ) -> None:
        """Create it. `eos_token_ids`: the target's. `max_context`: tokens that the model can see. `inner`: a proposer for this
        model."""
        self.name = name
        self.kv = kv
        self._model = model
        self._sampler = sampler
        self._room = room
        self._eos_token_ids = frozenset(eos_token_ids)
        self._max_context = max_context
        self._inner = inner
        self._catch_up_tokens = catch_up_tokens

    def prepare(self) -> None:
        """Prepare the model before the first request, like LoadedModel.prepare, except sampling, which is the target's."""
        own, kv = getattr(self._model, "prepare_steps", None), self.kv.tensor
        if own is not None and loader.is_prepared_on(kv.device):
            own(kv)

    @torch.inference_mode()
    def propose(self, asks: Sequence_[Ask]) -> list[Draft]:
        """Return drafts as Proposer does; all are chains."""
        courses, late = self._plan(asks)
        self._guess_ahead(courses)
        going = courses
        while going or late:
            logits = self._forward([*(course.chunk for course in going), *late])
            self._draw(going, logits)
            going, late = [course for course in going if not course.is_over], []
        drafts = {course.sequence: course.draft(self.name) for course in courses}
        return [drafts.get(ask.sequence, NOTHING) for ask in asks]

    def learn(self, sequence: Sequence, verified: Verified, hidden: Tensor | None) -> None:
        """Do nothing for this model, which finds new tokens by itself; the inner proposer may need them."""
        if self._inner is not None:
            self._inner.learn(sequence, verified, None)

    @property
    def learns(self) -> bool:
        return self._inner is not None and self._inner.learns

    def _plan(self, asks: Sequence_[Ask]) -> tuple[list[Course], list[Chunk]]:
        """Choose the sequences to draft for, and the chunks for those that lack too much KV. Those that lack least come first: a
        long prompt gets the rest of the budget."""
        courses: list[Course] = []
        late: list[Chunk] = []
        budget = self._catch_up_tokens
        for num_lacking, ask in sorted(((self._num_lacking(ask.sequence), ask) for ask in asks), key=lambda pair: pair[0]):
            depth = self._depth(ask)
            if depth < 1:
                continue
            if num_lacking > budget:
                late += _catch_up(ask.sequence, num_lacking, budget)
                budget = 0
            elif self._room(ask.sequence, ask.sequence.num_tokens + depth - 1, len(asks)):
                courses.append(Course(ask, depth, ask.sequence.num_tokens - 1 - num_lacking, self._eos_token_ids))
                budget -= num_lacking
        return courses, late

    def _num_lacking(self, sequence: Sequence) -> int:
        """Return how many known tokens lack KV here, except the last, which is computed anyway: for its logits."""
        return max(0, sequence.num_tokens - 1 - self.kv.num_valid(sequence))

    def _depth(self, ask: Ask) -> int:
        """Return the depth; the last draft token is not computed, so it may be one beyond the model's context."""
        return min(ask.max_depth, ask.max_tokens, self._max_context + 1 - ask.sequence.num_tokens)

    def _guess_ahead(self, courses: list[Course]) -> None:
        # The tokens that a grammar allows after a token are known only after a step of its matcher, which is not worth the time.
        able = [course for course in courses if course.depth > 1 and course.is_unconstrained]
        if self._inner is None or not able:
            return
        asks = [Ask(course.sequence, course.depth - 1, 2 * (course.depth - 1), LEAST_AHEAD) for course in able]
        for course, draft in zip(able, self._inner.propose(asks), strict=True):
            course.ahead = draft.token_ids[: len(draft.branches[0])] if draft else ()

    def _forward(self, chunks: list[Chunk]) -> Tensor:
        kv = self.kv.tensor
        logits = self._model.forward(batch_of(chunks, kv.shape[3]), kv)
        for chunk in chunks:
            self.kv.wrote(chunk)
        return logits

    def _draw(self, courses: list[Course], logits: Tensor) -> None:
        rows = [course.rows() for course in courses]
        flat = [row for of_one in rows for row in of_one]
        if not flat:
            return
        # Where the draft's logits are not finite any token stands in: the target decides.
        drawn = [max(0, token.token_id) for token in self._sampler.sample(logits, flat)]
        likely = chances(logits, drawn, flat)
        start = 0
        for course, of_one in zip(courses, rows, strict=True):
            end = start + len(of_one)
            course.take(drawn[start:end], likely[start:end])
            start = end


def _catch_up(sequence: Sequence, num_lacking: int, budget: int) -> list[Chunk]:
    """Return chunks of tokens that are computed in the target: those slots exist, and sequences that share them write the
    same."""
    first = sequence.num_tokens - 1 - num_lacking
    tokens = sequence.tokens(first, min(first + budget, sequence.num_computed))
    return [Chunk(sequence, first, tokens, 0)] if tokens else []
