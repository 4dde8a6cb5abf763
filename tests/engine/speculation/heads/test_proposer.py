"""Heads draft what the model would draw if it saw as they do, within each ask's bounds."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from pdmesh.engine.sampling.counter_rng import gumbel
from pdmesh.engine.sampling.sampler import SampledToken, Sampler, SampleRow
from pdmesh.engine.scheduler.sequence import Sequence
from pdmesh.engine.speculation.draft import NOTHING, Draft, Verified
from pdmesh.engine.speculation.draft_heads.proposer import HeadProposer
from pdmesh.engine.speculation.draft_heads.reference import TorchHeads
from pdmesh.engine.speculation.proposer import Ask, Proposer
from tests.engine.speculation.heads.tiny_heads import HIDDEN, VOCAB, make_embedding, make_heads, make_sequence

EOS = 2


def make_proposer(kind: str = "recurrent", depth: int = 4) -> HeadProposer:
    return HeadProposer(TorchHeads(make_heads(kind, depth=depth), make_embedding()), Sampler(), VOCAB, {EOS})


def hidden_of(number: int) -> torch.Tensor:
    return torch.randn(HIDDEN, generator=torch.Generator().manual_seed(100 + number))


def taught(proposer: HeadProposer, number: int, **sampling: object) -> Sequence:
    """A sequence whose last token the proposer has seen drawn."""
    sequence = make_sequence([11, 12, 13 + number], **sampling)
    proposer.learn(sequence, Verified(NOTHING, (13 + number,)), hidden_of(number))
    return sequence


def expected_chain(number: int, output: list[int], depth: int, **sampling: object) -> list[int]:
    """Tokens that the model's own sampler draws, one after the other, from the heads' logits over the whole vocabulary."""
    maths, tokens = TorchHeads(make_heads(), make_embedding()), list(output)
    state = maths.begin([hidden_of(number)])
    for _ in range(depth):
        state = maths.advance(0, state, [tokens[-1]])
        logits = torch.full((1, VOCAB), -torch.inf)
        logits[0, maths.heads.token_ids] = maths.score(state).logits
        params = make_sequence([], **sampling).group.request.sampling
        row = SampleRow(params, 0, len(tokens), (7, 8, 9), tokens, frozenset({EOS}))
        tokens.append(Sampler().sample(logits, [row])[0].token_id)
    return tokens[len(output) :]


WAYS: list[dict[str, object]] = [
    {},
    {"temperature": 0.9, "seed": 5},
    {"temperature": 1.3, "seed": 6, "top_k": 7, "min_p": 0.01},
    {"repetition_penalty": 1.5},
    {"temperature": 0.8, "seed": 7, "presence_penalty": 1.0, "frequency_penalty": 0.5, "logprobs": 2},
    {"min_tokens": 50},
]


@pytest.mark.parametrize("way", WAYS)
def test_a_chain_is_drawn_as_the_model_draws(way: dict[str, object]) -> None:
    proposer = make_proposer()
    sequence = taught(proposer, 0, ignore_eos=True, **way)
    [draft] = proposer.propose([Ask(sequence, 4, 4)])
    assert draft.is_chain
    assert list(draft.token_ids) == expected_chain(0, sequence.output, 4, ignore_eos=True, **way)
    assert all(0 < chance <= 1 for chance in draft.chances)
    assert draft.proposer == proposer.name == "heads"


class OfADevice:
    """Sees where the rows lie that it is given; none can be read there."""

    def sample(self, logits: torch.Tensor, rows: list[SampleRow]) -> list[SampledToken]:
        assert (logits.device.type, tuple(logits.shape)) == ("meta", (len(rows), VOCAB))
        return [SampledToken(1, None) for _ in rows]


def test_a_sampler_of_a_device_gets_rows_of_its_memory() -> None:
    maths = TorchHeads(make_heads(), make_embedding())
    proposer = HeadProposer(maths, OfADevice(), VOCAB, {EOS}, torch.device("meta"))
    sequence = taught(proposer, 0, temperature=0.9, seed=5)
    [draft] = proposer.propose([Ask(sequence, 2, 2)])
    assert set(draft.token_ids) == {1}


def test_chances_are_probabilities_given_the_noise() -> None:
    proposer, maths = make_proposer(), TorchHeads(make_heads(), make_embedding())
    logits = maths.score(maths.advance(0, maths.begin([hidden_of(0)]), [13])).logits[0]
    for temperature in (0.0, 0.7, 1e-9):
        sequence = taught(proposer, 0, temperature=temperature, seed=3)
        [draft] = proposer.propose([Ask(sequence, 1, 1)])
        at = maths.heads.token_ids.tolist().index(draft.token_ids[0])
        noise = gumbel(3, 0, len(sequence.output), maths.heads.token_ids)
        assert draft.chances[0] == pytest.approx(float((logits + temperature * noise).softmax(-1)[at]), rel=1e-4)


@pytest.mark.parametrize("kind", ["recurrent", "medusa"])
def test_each_sequence_is_drafted_for_as_if_alone(kind: str) -> None:
    proposer = make_proposer(kind)
    sequences = [taught(proposer, number, **WAYS[number % len(WAYS)]) for number in range(6)]
    asks = [Ask(sequence, 1 + number % 4, 3, 0.001 * number) for number, sequence in enumerate(sequences)]
    together = proposer.propose(asks)
    for draft, alone in zip(together, (proposer.propose([ask])[0] for ask in asks), strict=True):
        assert (draft.token_ids, draft.parents) == (alone.token_ids, alone.parents)
        assert draft.chances == pytest.approx(alone.chances, rel=1e-4)
    assert len({draft.token_ids for draft in together}) > 3
    for ask, draft in zip(asks, together, strict=True):
        assert 0 < len(draft) <= ask.max_tokens
        assert max(draft.depths) <= ask.max_depth


@pytest.mark.parametrize("kind", ["recurrent", "medusa"])
def test_bounds(kind: str) -> None:
    proposer = make_proposer(kind, depth=3)
    sequence = taught(proposer, 0)
    [whole] = proposer.propose([Ask(sequence, 9, 9)])
    assert max(whole.depths) == 3
    for least in (1e-6, 0.01, 0.1, 0.5, 1.1):
        [draft] = proposer.propose([Ask(sequence, 9, 9, least)])
        assert all(kept >= least for kept in draft.cumulative)
        assert len(draft) <= len(whole)
    assert draft == NOTHING


def test_a_recurrent_draft_goes_on_as_far_as_its_chances_reach() -> None:
    proposer = make_proposer()
    sequence = taught(proposer, 0)
    [whole] = proposer.propose([Ask(sequence, 4, 4)])
    for length, kept in enumerate(whole.cumulative):
        [draft] = proposer.propose([Ask(sequence, 4, 4, kept)])
        assert draft == whole.first(length + 1)


def test_nothing_comes_behind_the_end() -> None:
    proposer = make_proposer()
    [whole] = proposer.propose([Ask(taught(proposer, 0), 4, 4)])
    stopping = taught(proposer, 0, stop_token_ids=(whole.token_ids[1],))
    assert proposer.propose([Ask(stopping, 4, 4)]) == [whole.first(2)]


def test_medusa_heads_guess_a_tree_from_the_last_token_alone() -> None:
    heads = make_heads("medusa", depth=2)
    maths, proposer = TorchHeads(heads, make_embedding()), make_proposer("medusa", depth=2)
    [draft] = proposer.propose([Ask(taught(proposer, 0), 2, 8)])
    begin = maths.begin([hidden_of(0)])
    best = []
    for number in range(2):
        chances = maths.score(maths.advance(number, begin, [13])).logits[0].softmax(-1)
        best.append({int(heads.token_ids[at]): float(chances[at]) for at in chances.topk(4).indices.tolist()})
    assert len(draft) == 8
    assert not draft.is_chain
    for token, depth, chance in zip(draft.token_ids, draft.depths, draft.chances, strict=True):
        assert chance == pytest.approx(best[depth - 1][token], rel=1e-4)


class TestMemory:
    def test_it_is_a_proposer(self) -> None:
        proposer: Proposer = make_proposer()
        assert (proposer.is_free, proposer.wants_hidden) == (False, True)

    def test_a_sequence_that_it_has_not_seen_gets_nothing(self) -> None:
        proposer = make_proposer()
        unseen, seen = make_sequence([1, 2]), taught(proposer, 0)
        [nothing, draft] = proposer.propose([Ask(unseen, 4, 4), Ask(seen, 4, 4)])
        assert nothing == NOTHING
        assert draft.token_ids == proposer.propose([Ask(seen, 4, 4)])[0].token_ids != ()

    def test_tokens_that_it_has_not_seen_drawn(self) -> None:
        proposer = make_proposer()
        sequence = taught(proposer, 0)
        sequence.output.append(1)  # as a grammar forces it
        assert proposer.propose([Ask(sequence, 4, 4)]) == [NOTHING]
        proposer.learn(sequence, Verified(NOTHING, (33,)), hidden_of(1))
        assert proposer.propose([Ask(sequence, 4, 4)]) == [NOTHING]
        proposer.learn(sequence, Verified(NOTHING, (1,)), None)
        assert proposer.propose([Ask(sequence, 4, 4)]) == [NOTHING]
        proposer.learn(sequence, Verified(Draft.chain([9], [1.0], ""), (9, 1)), hidden_of(1))
        assert proposer.propose([Ask(sequence, 4, 4)]) != [NOTHING]

    def test_one_vector_travels(self) -> None:
        here, there = make_proposer(), make_proposer()
        sequence = taught(here, 0)
        hidden = here.hidden(sequence)
        assert hidden is not None
        moved = make_sequence(list(sequence.output))
        there.restore(moved, hidden)
        assert there.propose([Ask(moved, 4, 4)]) == here.propose([Ask(sequence, 4, 4)])
        assert here.hidden(make_sequence([1])) is None

    def test_nothing_is_kept_of_a_sequence_that_is_gone(self) -> None:
        proposer = make_proposer()
        sequence = taught(proposer, 0)
        proposer.propose([Ask(sequence, 4, 4)])
        reference = weakref.ref(sequence)
        del sequence
        gc.collect()
        assert reference() is None
