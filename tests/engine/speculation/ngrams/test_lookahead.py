"""What lookahead makes of draws behind wrong guesses, and that its trials stay rare."""

from __future__ import annotations

import random
from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from pdmesh.engine.scheduler.sequence import Sequence
from pdmesh.engine.speculation.draft import NOTHING, ROOT, Draft
from pdmesh.engine.speculation.ngrams.lookahead import _LONGEST_PAUSE, _SHORTEST_PAUSE, Lookahead
from pdmesh.engine.speculation.policy import TRIAL_STEPS
from pdmesh.engine.speculation.proposer import Ask
from tests.engine.speculation.copying import decoding, propose, step, verify


def wrong_draft(*tokens: int) -> Draft:
    return Draft.chain(tokens, [0.5] * len(tokens), "somebody")


def test_draws_behind_wrong_tokens_are_the_next_guess() -> None:
    """They stand where the tokens behind the new one will."""
    proposer, sequence = Lookahead(), decoding([1], [2])
    propose(proposer, sequence)
    step(proposer, sequence, wrong_draft(20, 21, 22), lambda path: [3, 40, 50, 60][len(path)])
    assert sequence.output == [2, 3]
    assert propose(proposer, sequence).token_ids == (40, 50, 60)


def test_kept_tokens_move_the_trajectory_on() -> None:
    proposer, sequence = Lookahead(), decoding([1], [2])
    propose(proposer, sequence)
    step(proposer, sequence, wrong_draft(3, 21, 22), lambda path: [3, 4, 50, 60][len(path)])
    assert sequence.output == [2, 3, 4]
    assert propose(proposer, sequence).token_ids == (50, 60)


def test_a_pooled_ngram_stands_beside_the_trajectory() -> None:
    proposer, sequence = Lookahead(), decoding([1], [2])
    propose(proposer, sequence)
    step(proposer, sequence, wrong_draft(7, 8, 9), lambda path: [3, 40, 50, 60][len(path)])  # 40 behind 7, 50 behind 8, …
    propose(proposer, sequence)
    step(proposer, sequence, wrong_draft(20, 21), lambda path: [7, 30, 31][len(path)])
    draft = propose(proposer, sequence)
    assert draft.token_ids == (40, 30, 31)
    assert draft.parents == (ROOT, ROOT, 1)
    assert draft.chances[0] + draft.chances[1] <= 1.0


def test_ngrams_grow_with_the_steps() -> None:
    """a was guessed; b drawn behind it and then guessed in its turn; c drawn behind b: a b c."""
    a, b, c = 70, 71, 72
    proposer, sequence = Lookahead(), decoding([1], [2])
    propose(proposer, sequence)
    step(proposer, sequence, wrong_draft(20, a, 22), lambda path: [3, 40, b, 60][len(path)])
    draft = propose(proposer, sequence)
    assert draft.token_ids[:2] == (40, b)
    step(proposer, sequence, draft, lambda path: [4, 41, c, 61][len(path)])
    propose(proposer, sequence)
    step(proposer, sequence, NOTHING, lambda path: a)
    assert propose(proposer, sequence).token_ids == (b, c)


def test_nothing_is_known_of_tokens_that_came_unseen() -> None:
    proposer, sequence = Lookahead(), decoding([1], [2])
    propose(proposer, sequence)
    step(proposer, sequence, wrong_draft(20, 21), lambda path: [3, 40, 50][len(path)])
    sequence.output.append(4)  # forced by a grammar
    assert len(propose(proposer, sequence)) == 0


def test_guesses_that_miss_are_not_believed_any_more() -> None:
    proposer, sequence = Lookahead(), decoding([1], [2])
    random_ = random.Random(3)
    before = _first_chance(proposer, sequence, random_)
    for _ in range(100):
        _first_chance(proposer, sequence, random_)
    assert _first_chance(proposer, sequence, random_) < before / 2


def _first_chance(proposer: Lookahead, sequence: Sequence, random_: random.Random) -> float:
    propose(proposer, sequence)
    step(proposer, sequence, wrong_draft(*random_.sample(range(1000), 3)), lambda path: random_.randrange(1000, 10**6))
    return propose(proposer, sequence, depth=1, tokens=1).chances[0]


def test_a_model_that_goes_by_its_last_token_takes_fewer_steps() -> None:
    """Behind a wrong token it soon draws what it would have drawn anyway, a place earlier or later."""
    assert _num_steps(lambda tokens: (tokens[-1] * 7 + 1) % 50, 400) < 200


def _num_steps(model: Callable[[list[int]], int], num_tokens: int) -> int:
    proposer, sequence, steps = Lookahead(), decoding([1], [2]), 0
    expected = [2]
    while len(expected) < num_tokens + 10:
        expected.append(model(expected))
    while len(sequence.output) < num_tokens:
        draft = propose(proposer, sequence) if steps else wrong_draft(48, 49)
        step(proposer, sequence, draft, lambda path: model([*sequence.output, *path]))
        steps += 1
    assert sequence.output == expected[: len(sequence.output)]
    return steps


def test_trials_in_vain_become_rare() -> None:
    """A policy verifies nothing that is unlikely but in trials, and those say what they are."""
    proposer = Lookahead()
    sequences = [decoding([1], [2]) for _ in range(4)]
    random_ = random.Random(11)
    tried: list[int] = []
    num_steps = 20_000
    for at in range(num_steps):
        drafts = proposer.propose([Ask(sequence, 8, 8, least_chance=0.5, may_try=True) for sequence in sequences])
        assert sum(bool(len(draft)) for draft in drafts) <= 1, "one sequence at a time"
        tried += [at] * any(len(draft) for draft in drafts)
        assert all(draft.is_trial and sum(draft.cumulative) < 0.6 for draft in drafts if len(draft))
        for sequence, draft in zip(sequences, drafts, strict=True):
            step(proposer, sequence, draft, lambda path: random_.randrange(10**6))
    pauses, pause = 0, _SHORTEST_PAUSE
    while pause <= min(num_steps, _LONGEST_PAUSE):
        pauses, pause = pauses + 1, 2 * pause
    assert 2 * TRIAL_STEPS <= len(tried) <= pauses * TRIAL_STEPS


def test_no_trial_begins_where_none_may() -> None:
    proposer, sequence = Lookahead(), decoding([1], [2])
    for _ in range(4 * _SHORTEST_PAUSE):
        assert not propose(proposer, sequence)
        step(proposer, sequence, NOTHING, lambda path: len(sequence.output))
    assert propose(proposer, sequence, may_try=True).is_trial


def test_a_trial_that_succeeds_is_followed_up() -> None:
    """Guesses were always wrong; now the text has become one that guesses find."""
    proposer, sequence = Lookahead(), decoding([1], [2])
    random_ = random.Random(2)
    for _ in range(300):
        propose(proposer, sequence, least_chance=0.05)
        step(proposer, sequence, wrong_draft(5, 6), lambda path: random_.randrange(10**6))
    kept = 0
    for _ in range(1500):
        draft = propose(proposer, sequence, least_chance=0.5, may_try=True)
        kept += len(step(proposer, sequence, draft, lambda path: ([*sequence.output, *path][-1] + 1) % 20).kept)
    assert kept > 1000


@given(st.lists(st.integers(0, 4), min_size=2, max_size=80), st.integers(1, 6), st.integers(0, 4))
def test_any_text_comes_out_as_drawn(future: list[int], depth: int, wrong: int) -> None:
    proposer, sequence = Lookahead(), decoding([1], future[:1])
    left = future[1:]
    first = wrong_draft(1, 2)
    while len(left) > max(depth, 2):
        draft = propose(proposer, sequence, depth, depth + 2)
        verified = verify(proposer, sequence, draft if len(draft) else first, left, wrong)
        left = left[len(verified.new_tokens) :]
    assert sequence.output == future[: len(future) - len(left)]
