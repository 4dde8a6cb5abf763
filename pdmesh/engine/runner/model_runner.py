"""The model runner turns a SchedulerOutput into drawn tokens: block copies, one forward pass, one draw per choice at its end.

A scheduled sequence with a draft draws once behind its last known token and once behind each draft token, all with the noise of
their own positions; comparing the draws with the draft decides which of them count (`Verified`).
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable, Iterator, Mapping
from collections.abc import Sequence as Sequence_
from functools import partial
from itertools import accumulate, chain
from types import MappingProxyType
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from pdmesh.adapter_id import AdapterId
from pdmesh.engine.kv_cache.block_pool import num_blocks_for
from pdmesh.engine.kv_cache.events import LayerReadiness
from pdmesh.engine.kv_cache.moves import copy_blocks, indices_for, move_slots
from pdmesh.engine.runner.batch import StepBatch, Tail
from pdmesh.engine.runner.decode_batch import DecodeBatch
from pdmesh.engine.runner.prompt_outputs import Pooler, take_scores
from pdmesh.engine.sampling.grammar import Bits
from pdmesh.engine.sampling.sampler import SampledToken, SampleRow
from pdmesh.engine.scheduler.scheduler import ScheduledSequence, SchedulerOutput
from pdmesh.engine.scheduler.sequence import Sequence
from pdmesh.engine.speculation.draft import NOTHING, ROOT, Verified
from pdmesh.engine.speculation.guarded_proposer import allowed_on_tree
from pdmesh.engine.weight_versions import ForwardModel, WeightVersion, WeightVersions

_HOST = torch.device("cpu")


class TokenSampler(Protocol):
    """The methods of a sampler that the runner needs: see pdmesh/engine/sampling/sampler.py."""

    def sample(self, logits: Tensor, rows: list[SampleRow]) -> list[SampledToken]: ...


class OtherPools(Protocol):
    """Pools of other processes that repeat copies in the runner's: see pdmesh/engine/parallel/model.py."""

    def copy_blocks(self, sources: Sequence_[int], targets: Sequence_[int]) -> None: ...
    def move_slots(self, sources: Sequence_[int], targets: Sequence_[int]) -> None: ...


class SampledOutput(NamedTuple):
    """Hold new tokens of one choice: one, or one more than were accepted of its draft."""

    choice: int
    tokens: tuple[SampledToken, ...]
    verified: Verified | None = None  # None where several choices draw from one row
    hidden: Tensor | None = None  # [hidden_size] float32, behind the last token; None unless the runner keeps hidden states
    pooled: tuple[float, ...] = ()  # the prompt's embedding, if it is wanted


class ModelRunner:
    """Run one model on one KV pool tensor [num_layers, 2, num_blocks, block_size, num_kv_heads, head_dim]."""

    def __init__(
        self,
        model: ForwardModel,
        kv: Tensor,
        sampler: TokenSampler,
        eos_token_ids: Collection[int],
        *,
        hidden_size: int | None = None,
        arrangement: str = "plain",
        others: OtherPools | None = None,
        adapter_slots: Mapping[AdapterId, int] = MappingProxyType({}),
        pooler: Pooler | None = None,
        reads_plain_draws: bool = True,
        weights_hash: str = "",
    ) -> None:
        """`hidden_size` of the hidden states that each draw returns; None: they are not needed. `arrangement` of the
        pool, see kvtransfer/conversion.py. `others`: pools that have to follow this one. `adapter_slots`: where
        adapters are loaded now, which may change between steps. `pooler`: what makes embeddings; None: no request has pooling.
        `reads_plain_draws` False: nothing reads `SampledOutput.verified` of repeated plans. `weights_hash`: the model's."""
        self.versions = WeightVersions(WeightVersion(weights_hash, model, pooler))
        self._reads_plain_draws = reads_plain_draws
        self._kept: KeptInput | None = None
        self._adapter_slots = adapter_slots
        self._others = others
        self._arrangement = arrangement
        self._hidden_size = hidden_size
        self._kv, self._block_size = kv, kv.shape[3]
        self._sampler = sampler
        self._eos_token_ids = frozenset(eos_token_ids)

    def run(
        self, plan: SchedulerOutput, signal: LayerReadiness | None = None, *, keep_hidden: bool = True
    ) -> dict[Sequence, list[SampledOutput]]:
        """Compute the scheduled sequences, whose blocks have been copied; return the draws of those that reach their end.
        `keep_hidden`: the hidden states of this step are needed, if they are ever."""
        if plan.num_repeats and not (keep_hidden and self._hidden_size is not None) and self._has_one_version(plan):
            return self._run_again(plan)
        self._kept = None
        return self._run_new(plan, signal, keep_hidden=keep_hidden)

    @torch.inference_mode()
    def _run_new(
        self, plan: SchedulerOutput, signal: LayerReadiness | None, *, keep_hidden: bool
    ) -> dict[Sequence, list[SampledOutput]]:
        parts = self.versions.split(plan.pieces)
        if len(parts) == 1:
            return self._run_pieces(*parts[0], signal, keep_hidden=keep_hidden)
        draws: dict[Sequence, list[SampledOutput]] = {}
        for version, pieces in parts:  # a signal counts the layers of one pass: KV is announced at the end of such a step
            draws |= self._run_pieces(version, pieces, None, keep_hidden=keep_hidden)
        return draws

    def _run_pieces(
        self, version: WeightVersion, pieces: list[ScheduledSequence], signal: LayerReadiness | None, *, keep_hidden: bool
    ) -> dict[Sequence, list[SampledOutput]]:
        """Compute sequences of one version of the weights in one pass."""
        batch, model = self.batch_of(pieces), version.model
        if version.pooler is not None and any(piece.sequence.group.request.pooling for piece in pieces):
            return self._run_pooling(version, pieces, batch, signal)
        if self._hidden_size is None or not keep_hidden:
            return self._draw(pieces, model.forward(batch, self._kv, signal), None)
        hidden = torch.empty((len(batch.logits_rows), self._hidden_size), dtype=torch.float32, device=self._kv.device)
        return self._draw(pieces, model.forward(batch, self._kv, signal, hidden), hidden)

    def _run_again(self, plan: SchedulerOutput) -> dict[Sequence, list[SampledOutput]]:
        """Run a plan of sequences that decode once more, with the input of the step before."""
        kept = self._kept
        if kept is None or kept.plan is not plan:
            kept = self._kept = KeptInput(plan, [self._sample_row(owner) for owner in _owners(plan.pieces)])
        batch = kept.batch_of_next(self._block_size, self._adapter_slots)
        model = self.versions.of(kept.weights_hash).model
        tokens = self._sampler.sample(model.forward(batch, self._kv), kept.rows_of_next())
        return {
            sequence: [SampledOutput(sequence.choices[0], (token,), self._verified_alone(token))]
            for sequence, token in zip(kept.sequences, tokens, strict=True)
        }

    def _has_one_version(self, plan: SchedulerOutput) -> bool:
        return len(self.versions) == 1 or len({sequence.group.weights_hash for sequence in plan.sequences}) == 1

    def forget_input(self) -> None:
        """Drop what was kept for a further step of the same sequences, and what the model keeps with it: none of them runs."""
        self._kept = None

    def _verified_alone(self, token: SampledToken) -> Verified | None:
        return Verified(NOTHING, (token.token_id,)) if self._reads_plain_draws else None

    def _run_pooling(
        self, version: WeightVersion, pieces: list[ScheduledSequence], batch: StepBatch, signal: LayerReadiness | None
    ) -> dict[Sequence, list[SampledOutput]]:
        pooler = version.pooler
        assert pooler is not None
        hidden = torch.empty((len(batch.logits_rows), pooler.hidden_size), dtype=torch.float32, device=self._kv.device)
        logits = version.model.forward(batch, self._kv, signal, hidden)
        pooled = pooler.take(pieces, hidden)
        draws = self._draw(pieces, logits, None if self._hidden_size is None else hidden)
        for sequence, embedding in pooled.items():
            draws[sequence] = [draw._replace(pooled=embedding) for draw in draws[sequence]]
        return draws

    @property
    def kv(self) -> Tensor:
        return self._kv

    def batch_of(self, pieces: list[ScheduledSequence]) -> StepBatch:
        """Return the batch in host memory: a model packs it, so that one copy goes to its device and nothing waits for it."""
        return build_batch(pieces, self._block_size, _HOST, self._adapter_slots)

    def adapters_of(self, pieces: list[ScheduledSequence]) -> tuple[int, ...]:
        """Return `StepBatch.adapter_slots` of sequences with one part each."""
        return _slots_of([piece.sequence for piece in pieces], self._adapter_slots)

    def copy_blocks(self, pieces: list[ScheduledSequence]) -> None:
        """Copy the blocks that have to be copied before the step writes. Until it returns, no freed block may be granted."""
        copies = [copy for piece in pieces for copy in piece.copies]
        if copies:
            self._copy([copy.source for copy in copies], [copy.target for copy in copies])

    @torch.inference_mode()
    def _copy(self, sources: list[int], targets: list[int]) -> None:
        # All sources are read before any target is written: a source may have been freed and be a target by now.
        copy_blocks(self._kv, sources, targets)
        if self._others is not None:
            self._others.copy_blocks(sources, targets)

    def _draw(
        self, pieces: list[ScheduledSequence], logits: Tensor, hidden: Tensor | None
    ) -> dict[Sequence, list[SampledOutput]]:
        """Draw from `logits` [R, vocab], `hidden` [R, hidden_size]: each scheduled sequence that draws has a row behind its last
        known token, then one behind each token of its draft; the choices of a trunk draw from the same row. Rows that do not draw
        (`ScheduledSequence.num_prompt_rows`) are for pooling and for log-probabilities of prompts."""
        has_prompt_rows = any(piece.num_prompt_rows for piece in pieces)
        if has_prompt_rows:
            take_scores(pieces, logits)
        owners = list(_owners(pieces))
        if not owners:
            return {}
        if len(owners) > len(logits) or has_prompt_rows:
            logits = logits[indices_for(logits, [owner.row for owner in owners])]
        tokens = self._sampler.sample(logits, [self._sample_row(owner) for owner in owners])
        states = None if hidden is None else hidden.unbind()
        draws: dict[Sequence, list[SampledOutput]] = {}
        for owner, first in ((owner, index) for index, owner in enumerate(owners) if owner.node == ROOT):
            drawn = tokens[first : first + 1 + len(owner.piece.draft)]
            draws.setdefault(owner.piece.sequence, []).append(self._draw_of(owner, drawn, states))
        return draws

    def _draw_of(self, owner: _Owner, drawn: list[SampledToken], states: Sequence_[Tensor] | None) -> SampledOutput:
        """Return the output of `drawn`, from all rows of the owner's sequence; `states` are the rows of `hidden`. Moves the KV of
        accepted tokens to where the block table says."""
        piece = owner.piece
        if len(piece.sequence.choices) > 1:
            return SampledOutput(owner.choice, (drawn[0],))
        verified = Verified(piece.draft, tuple([token.token_id for token in drawn]))
        self._move_kept(piece, verified)
        last = None if states is None else states[owner.row + verified.rows[-1]]
        return SampledOutput(owner.choice, tuple([drawn[row] for row in verified.rows]), verified, last)

    def _move_kept(self, piece: ScheduledSequence, verified: Verified) -> None:
        """Move KV from a token's position in the draft; on the first branch that is its position in the sequence."""
        moves = [(node, place) for place, node in enumerate(verified.kept) if node != place]
        if moves:
            first, block_size = piece.sequence.num_computed + piece.num_tokens, self._block_size
            slot = partial(_slot, piece.sequence.block_ids, block_size)
            sources, targets = [slot(first + node) for node, _ in moves], [slot(first + place) for _, place in moves]
            move_slots(self._kv, sources, targets, self._arrangement)
            if self._others is not None:
                self._others.move_slots(sources, targets)

    def _sample_row(self, owner: _Owner) -> SampleRow:
        sequence, draft = owner.piece.sequence, owner.piece.draft
        request, output = sequence.group.request, sequence.output
        branch = draft.branch(owner.node) if owner.node != ROOT else ()
        return SampleRow(
            params=request.sampling,
            choice=owner.choice,
            index=len(output) + len(branch),
            prompt=request.prompt,
            output=[*output, *(draft.token_ids[node] for node in branch)] if branch else output,
            eos_token_ids=self._eos_token_ids,
            allowed=owner.allowed,
            num_guessed=len(branch),
            owner=sequence,
        )


class KeptInput:
    """Keep the batch and the rows of a plan that is repeated (`SchedulerOutput.num_repeats`)."""

    def __init__(self, plan: SchedulerOutput, rows: list[SampleRow]) -> None:
        """`rows`: one for each sequence of the plan, which the draws change in place."""
        self.plan, self.sequences = plan, plan.sequences
        self.weights_hash = self.sequences[0].group.weights_hash
        self._rows = rows
        self._has_grammar = any(sequence.group.request.grammar is not None for sequence in self.sequences)
        self._batch: DecodeBatch | None = None

    def batch_of_next(self, block_size: int, adapter_slots: Mapping[AdapterId, int]) -> DecodeBatch:
        """Return the batch of the sequences' next tokens. `adapter_slots`: where adapters are loaded now."""
        slots, batch = _slots_of(self.sequences, adapter_slots), self._batch
        if batch is None or batch.adapter_slots != slots or not batch.advance(self.sequences, block_size):
            batch = self._batch = DecodeBatch.of(self.sequences, block_size, slots)
        return batch

    def rows_of_next(self) -> list[SampleRow]:
        """Return what the draws behind those tokens need."""
        for row in self._rows:
            row.index = len(row.output)
        if self._has_grammar:
            for row, sequence in zip(self._rows, self.sequences, strict=True):
                [row.allowed] = allowed_on_tree(sequence, NOTHING)
        return self._rows


class _Owner(NamedTuple):
    """The owner of a row of logits: a choice, behind its last known token (`node` ROOT) or behind one of its draft's."""

    row: int
    piece: ScheduledSequence
    choice: int
    node: int
    allowed: Bits | None


def _owners(pieces: list[ScheduledSequence]) -> Iterator[_Owner]:
    """Yield the owners of the rows that draw; those of a choice are consecutive, the root first. The tokens that a
    grammar allows are found here: on an accelerator the forward pass, which was only launched, still runs meanwhile."""
    row = 0
    for piece in pieces:
        row += piece.num_prompt_rows
        if not _draws(piece):
            continue
        allowed = allowed_on_tree(piece.sequence, piece.draft)
        for choice in piece.sequence.choices_to_draw:  # choices that still share a sequence share what is allowed
            for node in range(ROOT, len(piece.draft)):
                yield _Owner(row + 1 + node, piece, choice, node, allowed[node + 1])
        row += 1 + len(piece.draft)


def build_batch(
    pieces: list[ScheduledSequence],
    block_size: int,
    device: torch.device,
    adapter_slots: Mapping[AdapterId, int] = MappingProxyType({}),
) -> StepBatch:
    """Return the flat batch of scheduled sequences, in their order. A draft's first branch follows the known tokens; each
    other branch is a sequence of its own, whose last keys lie at its tokens' positions in the draft."""
    owned = [(piece, part) for piece in pieces for part in _parts(piece, block_size)]
    parts = [part for _, part in owned]
    query_starts = [0, *accumulate(len(part.token_ids) for part in parts)]
    positions = chain.from_iterable(range(part.context_len - len(part.token_ids), part.context_len) for part in parts)
    return StepBatch(
        token_ids=_int64s(chain.from_iterable(part.token_ids for part in parts), device),
        positions=_int64s(positions, device),
        slot_mapping=_int64s(chain.from_iterable(part.slots for part in parts), device),
        query_starts=query_starts,
        context_lens=[part.context_len for part in parts],
        block_tables=[part.blocks for part in parts],
        logits_rows=_int64s(_logits_rows(parts, query_starts), device),
        tails={index: part.tail for index, part in enumerate(parts) if part.tail is not None},
        adapter_slots=_slots_of([piece.sequence for piece, _ in owned], adapter_slots),
    )


def _int64s(numbers: Iterable[int], device: torch.device) -> Tensor:
    numbers = array("q", numbers)
    return (torch.frombuffer(numbers, dtype=torch.int64) if numbers else torch.empty(0, dtype=torch.int64)).to(device)


def _slots_of(sequences: Sequence_[Sequence], slots: Mapping[AdapterId, int]) -> tuple[int, ...]:
    """Return the slot of each sequence's adapter, -1 without one; empty where none has one."""
    if not slots:
        return ()
    adapters = [sequence.group.request.adapter for sequence in sequences]
    return tuple([-1 if each is None else slots[each] for each in adapters]) if any(adapters) else ()


class _Part(NamedTuple):
    """Consecutive tokens of a scheduled sequence: one sequence of the batch."""

    token_ids: Sequence_[int]
    slots: list[int]
    context_len: int
    blocks: list[int]
    num_rows: int  # how many of its last tokens have rows: those that draw, and those whose states are pooled
    tail: Tail | None = None


def _parts(piece: ScheduledSequence, block_size: int) -> Iterator[_Part]:
    sequence, draft, start = piece.sequence, piece.draft, piece.sequence.num_computed
    end = start + piece.num_tokens
    slot = partial(_slot, sequence.block_ids, block_size)
    branches = draft.branches
    first = branches[0] if branches else range(0)
    last = end + len(first)
    yield _Part(
        sequence.tokens(start, end) + draft.token_ids[: len(first)],
        [slot(p) for p in range(start, last)],
        last,
        sequence.block_ids[: num_blocks_for(last, block_size)],
        piece.num_prompt_rows + (1 + len(first) if _draws(piece) else 0),
    )
    for branch in branches[1:]:
        path = draft.branch(branch[-1])
        slots = [slot(end + node) for node in path]
        yield _Part(
            [draft.token_ids[node] for node in branch],
            slots[-len(branch) :],
            end + len(path),
            sequence.block_ids[: num_blocks_for(end + len(path), block_size)],
            len(branch),
            Tail(end, slots),
        )


def _slot(block_ids: list[int], block_size: int, position: int) -> int:
    return block_ids[position // block_size] * block_size + position % block_size


def _logits_rows(parts: list[_Part], query_starts: list[int]) -> list[int]:
    return [row for part, end in zip(parts, query_starts[1:], strict=True) for row in range(end - part.num_rows, end)]


def _draws(piece: ScheduledSequence) -> bool:
    return piece.reaches_end and bool(piece.sequence.choices_to_draw)
