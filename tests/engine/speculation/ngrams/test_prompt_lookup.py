"""What prompt lookup drafts, how it learns what a draft is worth, and that its bounds hold."""

from __future__ import annotations

import gc
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdmesh.engine.speculation.draft import ROOT
from pdmesh.engine.speculation.ngrams import token_history
from pdmesh.engine.speculation.ngrams.prompt_lookup import PromptLookup
from pdmesh.engine.speculation.ngrams.token_history import LONGEST, NgramIndex, match_length
from tests.engine.speculation.copying import decoding, propose, run, verify

TEXT = list(range(100, 160))


def test_drafts_what_followed_before() -> None:
    draft = propose(PromptLookup(), decoding([1, 2, 3, 4, 5, 6, 7], [9, 2, 3]), depth=3)
    assert draft.token_ids == (4, 5, 6)
    assert draft.is_chain
    assert draft.proposer == "prompt_lookup"


def test_nothing_without_a_match_of_two() -> None:
    assert len(propose(PromptLookup(), decoding([1, 2, 3, 4], [9, 3]))) == 0


@pytest.mark.parametrize(("prompt", "output"), [((5,), ()), ((), (5,)), ((5,), (5,)), ((), (5, 5))])
def test_so_few_tokens_match_nothing(prompt: tuple[int, ...], output: tuple[int, ...]) -> None:
    assert len(propose(PromptLookup(), decoding(prompt, output))) == 0


def test_the_longest_match_wins_and_the_latest_of_equals() -> None:
    prompt = [7, 1, 2, 30, 8, 1, 2, 40, 9, 1, 2, 50]
    assert propose(PromptLookup(), decoding(prompt, [8, 1, 2]), depth=1, tokens=1).token_ids == (40,)
    assert propose(PromptLookup(), decoding(prompt, [6, 1, 2]), depth=1, tokens=1).token_ids == (50,)


def test_a_match_that_goes_on_differently_is_a_second_branch() -> None:
    draft = propose(PromptLookup(), decoding([7, 1, 2, 30, 31, 8, 1, 2, 40, 41], [7, 1, 2]), depth=2, tokens=4)
    assert draft.token_ids == (30, 31, 40, 41)
    assert draft.parents == (ROOT, 0, ROOT, 2)
    assert draft.chances[0] + draft.chances[2] <= 1.0, "one token stands there"


def test_of_two_branches_the_likeliest_tokens_stay() -> None:
    sequence = decoding([7, 1, 2, 30, 31, 8, 1, 2, 40, 41], [7, 1, 2])
    whole = propose(PromptLookup(), sequence, depth=2, tokens=4)
    most = propose(PromptLookup(), sequence, depth=2, tokens=2)
    assert sorted(most.cumulative) == sorted(whole.cumulative)[2:]


def test_repetition_goes_round() -> None:
    draft = propose(PromptLookup(), decoding([4], [1, 2, 3, 1, 2]), depth=7, tokens=7)
    assert draft.token_ids == (3, 1, 2, 3, 1, 2, 3)


def test_tokens_that_are_too_unlikely_are_left_out() -> None:
    sequence = decoding(TEXT, TEXT[:5])
    draft = propose(PromptLookup(), sequence, least_chance=0.2)
    assert 0 < len(draft) < 8
    assert min(draft.cumulative) >= 0.2
    assert len(propose(PromptLookup(), sequence, least_chance=0.99)) == 0


def test_a_copy_takes_few_steps() -> None:
    proposer = PromptLookup()
    assert run(proposer, decoding(TEXT, [1]), TEXT) <= 2 + len(TEXT) / 9 + 1


def test_a_copy_with_changes_is_taken_up_behind_them() -> None:
    """Tokens replaced, left out and put in: two tokens match again only later."""
    changed = [*TEXT[:20], 1, *TEXT[21:40], *TEXT[42:50], 2, 3, *TEXT[50:]]
    proposer = PromptLookup()
    sequence = decoding(TEXT, TEXT[:10])
    verify(proposer, sequence, propose(proposer, sequence, depth=8), changed[10:19])
    verify(proposer, sequence, propose(proposer, sequence, depth=8), changed[19:21])
    assert propose(proposer, sequence, depth=3, tokens=3).token_ids == tuple(TEXT[21:24]), "behind the token that was replaced"
    assert run(PromptLookup(), decoding(TEXT), changed) <= 2 + len(TEXT) / 9 + 3 * 2


def test_learns_while_nobody_has_a_draft_verified() -> None:
    """The policy asks for what is likely only; a sequence that begins to copy is noticed all the same."""
    proposer = PromptLookup()
    noise = random.Random(5).choices([1, 2, 3], k=300)
    sequence = decoding(TEXT, [1])
    for token_id in noise:
        propose(proposer, sequence, least_chance=0.999)
        sequence.output.append(token_id)
    doubted = propose(proposer, sequence, depth=1)
    assert max(doubted.chances) < 0.7, "three words at random"
    for token_id in TEXT[:40]:
        assert len(propose(proposer, sequence, least_chance=0.9999)) == 0
        sequence.output.append(token_id)
    assert propose(proposer, sequence, depth=1).chances[0] > 0.85


def test_chances_come_true() -> None:
    """Half of the pairs go on as before: so the drafts say."""
    random_ = random.Random(7)
    proposer = PromptLookup()
    promised = kept = 0.0
    for _ in range(60):
        prompt = [random_.randrange(1000) for _ in range(200)]
        sequence = decoding(prompt)
        for at in range(0, 196, 4):
            sequence.output += prompt[at : at + 2]
            draft = propose(proposer, sequence, depth=1)
            goes_on = prompt[at + 2] if random_.random() < 0.5 else 5000
            if len(draft) and draft.token_ids[0] == prompt[at + 2]:
                promised += draft.chances[0]
                kept += goes_on == prompt[at + 2]
            sequence.output += [goes_on, 6000 + at]
    assert promised == pytest.approx(kept, rel=0.12)


def test_a_sequence_that_copies_is_believed_more_than_others() -> None:
    proposer = PromptLookup()
    pairs = [token for number in range(40) for token in (1, 2, 1000 + number)]  # "1 2" goes on differently each time
    other, copier = decoding(pairs, [7]), decoding(TEXT, [7])
    run(proposer, other, pairs[60:])
    run(proposer, copier, TEXT[:30])
    fresh = decoding(TEXT, [7])
    for sequence in (copier, fresh):
        sequence.output += [8, *TEXT[30:33]]
    believed = [propose(proposer, sequence, depth=1).chances[0] for sequence in (copier, fresh)]
    assert believed[0] > believed[1]


def test_a_long_prompt_is_entered_in_portions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_history, "PORTION", 16)
    proposer, sequence = PromptLookup(), decoding(TEXT, TEXT[:3])
    answers = [len(propose(proposer, sequence, depth=2)) for _ in range(5)]
    assert answers == [0, 0, 0, 2, 2]


def test_asked_seldom_or_twice() -> None:
    """Tokens may come between two questions, or none."""
    proposer, sequence = PromptLookup(), decoding(TEXT, TEXT[:4])
    first = propose(proposer, sequence, depth=2)
    assert propose(proposer, sequence, depth=2).token_ids == first.token_ids
    sequence.output += [*TEXT[4:10], 5, 6, 7, *TEXT[20:25]]
    assert propose(proposer, sequence, depth=2).token_ids == tuple(TEXT[25:27])


def test_a_sequence_that_is_gone_is_forgotten() -> None:
    proposer, sequence = PromptLookup(), decoding(TEXT, TEXT[:4])
    propose(proposer, sequence)
    assert len(proposer._readers) == 1
    del sequence
    gc.collect()
    assert len(proposer._readers) == 0


@given(st.lists(st.integers(0, 3), min_size=2, max_size=60), st.integers(2, 60))
def test_search_is_what_a_scan_finds(tokens: list[int], first: int) -> None:
    """The longest match, the latest of equals: among so few places no candidate is passed over."""
    tokens = [token * 1000 + at // 12 for at, token in enumerate(tokens)]  # each pair at few places
    index = NgramIndex(tokens[:first])
    index.tokens += tokens[first:]
    index.catch_up(1000)
    (_, place, length), (_, other_place, other_length) = index.search()
    end = len(tokens)
    lengths = {at: match_length(tokens, at, tokens, end, 0) for at in range(2, end)}
    best = max(((found, at) for at, found in lengths.items() if found >= 2), default=(0, 0))
    assert (length, place) == best
    assert length <= LONGEST
    if other_length:
        assert lengths[other_place] == other_length
        assert tokens[other_place] != tokens[place]


@given(
    st.lists(st.integers(0, 4), min_size=1, max_size=40), st.lists(st.integers(0, 4), min_size=2, max_size=80), st.integers(1, 6)
)
def test_any_text_comes_out_as_drawn(prompt: list[int], future: list[int], depth: int) -> None:
    proposer, sequence = PromptLookup(), decoding(prompt, future[:1])
    left = future[1:]
    while len(left) > depth:
        verified = verify(proposer, sequence, propose(proposer, sequence, depth, depth + 2), left)
        left = left[len(verified.new_tokens) :]
    assert sequence.output == future[: len(future) - len(left)]


@given(st.lists(st.integers(0, 3), min_size=4, max_size=120), st.integers(1, 20))
def test_no_trail_follows_the_sequence_itself(tokens: list[int], num_prompt: int) -> None:
    """Where nothing comes yet nothing can be followed: such a trail would be right at every token, and propose none."""
    proposer, sequence = PromptLookup(), decoding(tokens[:num_prompt] or [0])
    for token_id in tokens[num_prompt:]:
        sequence.output.append(token_id)
        draft = propose(proposer, sequence)
        trail = proposer._readers[sequence].trail
        assert not trail.rung or trail.place < len(trail.source)
        assert bool(draft) == bool(trail.rung or trail.other[2])
