"""What one output drafts for another, and that no tenant's text is ever drafted for another."""

from __future__ import annotations

import gc
import random

import pytest

from pdmesh.engine.speculation.draft import ROOT
from pdmesh.engine.speculation.ngrams import token_history
from pdmesh.engine.speculation.ngrams.retrieval import Retrieval
from tests.engine.speculation.copying import decoding, propose, run

TEXT = list(range(100, 160))


def wrote(proposer: Retrieval, *outputs: list[int], cache_root: bytes = b"") -> None:
    """Requests that are over."""
    for output in outputs:
        propose(proposer, decoding([1], output, cache_root))


def test_drafts_what_followed_in_another_output() -> None:
    proposer = Retrieval()
    wrote(proposer, TEXT)
    draft = propose(proposer, decoding([2], [9, *TEXT[10:13]]), depth=3)
    assert draft.token_ids == tuple(TEXT[13:16])
    assert draft.proposer == "retrieval"


def test_two_tokens_are_no_match() -> None:
    proposer = Retrieval()
    wrote(proposer, TEXT)
    assert len(propose(proposer, decoding([2], [9, *TEXT[10:12]]))) == 0


def test_prompts_are_not_kept_but_for_what_the_output_begins_behind() -> None:
    proposer = Retrieval()
    propose(proposer, decoding(TEXT, [1, 2, 3, 4]))
    assert len(propose(proposer, decoding([9], TEXT[10:14]))) == 0
    assert propose(proposer, decoding([9], TEXT[-4:]), depth=2).token_ids == (1, 2)


def test_a_running_output_drafts_for_those_beside_it() -> None:
    proposer = Retrieval()
    first, second = decoding([1], TEXT[:5]), decoding([2], TEXT[:5])
    for sequence in (first, second):
        propose(proposer, sequence)
    first.output += TEXT[5:12]
    propose(proposer, first)
    assert propose(proposer, second, depth=8).token_ids == tuple(TEXT[5:12])


def test_the_better_match_first_and_the_other_beside_it() -> None:
    proposer = Retrieval()
    wrote(proposer, [7, 1, 2, 3, 30, 31], [8, 1, 2, 3, 40, 41])
    draft = propose(proposer, decoding([9], [7, 1, 2, 3]), depth=2, tokens=4)
    assert draft.token_ids == (30, 31, 40, 41)
    assert draft.parents == (ROOT, 0, ROOT, 2)


def test_a_copy_of_another_output_takes_few_steps() -> None:
    proposer = Retrieval()
    wrote(proposer, TEXT)
    assert run(proposer, decoding([2], TEXT[:3]), TEXT[3:]) <= 3 + len(TEXT) / 9


@pytest.mark.parametrize("num_buckets", [7, 64, 1 << 12])
def test_no_root_sees_the_outputs_of_another(num_buckets: int) -> None:
    """Even where all n-grams share a few buckets: what is proposed was written under the same root."""
    proposer = Retrieval(num_buckets=num_buckets)
    random_ = random.Random(num_buckets)
    roots = [b"one", b"two", b"three"]
    words = {root: list(range(1000 * number, 1000 * number + 40)) for number, root in enumerate(roots, 1)}
    shared = [1, 2, 3, 4]  # all write this, and go on with their own words or somebody else's
    written: dict[bytes, set[int]] = {root: set() for root in roots}
    num_drafted = 0
    for _ in range(200):
        root, start = random_.choice(roots), random_.randrange(40)
        sequence = decoding([9], [*shared, *words[root][start:], *shared], root)
        for more in ([], [*random_.choice(list(words.values()))[start : start + 4], *shared]):
            sequence.output += more
            written[root].update(sequence.output)
            draft = propose(proposer, sequence)
            assert set(draft.token_ids) <= written[root]
            num_drafted += len(draft)
    assert num_drafted


def test_a_root_of_its_own_finds_nothing() -> None:
    proposer = Retrieval()
    wrote(proposer, TEXT, cache_root=b"one")
    assert len(propose(proposer, decoding([2], TEXT[:10], b"two"))) == 0
    assert len(propose(proposer, decoding([2], TEXT[:10], b"one"))) > 0


def test_the_oldest_outputs_are_forgotten() -> None:
    proposer = Retrieval(max_tokens=200)
    wrote(proposer, TEXT)
    wrote(proposer, *([number] * 3 + list(range(1000 * number, 1000 * number + 40)) for number in range(1, 6)))
    assert len(propose(proposer, decoding([2], TEXT[:10]), least_chance=0.0)) == 0
    assert proposer._store._num_tokens == sum(len(kept.tokens) for kept in proposer._store._documents.values()) <= 200


def test_an_output_longer_than_all_memory_goes_on() -> None:
    proposer = Retrieval(max_tokens=50)
    sequence = decoding([1], TEXT[:40])
    propose(proposer, sequence)
    sequence.output += [*TEXT[40:], *TEXT[:8]]
    propose(proposer, sequence)
    sequence.output += TEXT[8:20]
    propose(proposer, sequence)
    assert proposer._store._num_tokens == 0


def test_a_long_history_is_entered_in_portions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_history, "PORTION", 16)
    proposer = Retrieval()
    writer, reader = decoding([1], TEXT), decoding([2], TEXT[40:44])
    for _ in range(2):
        propose(proposer, writer)
    assert len(propose(proposer, reader)) == 0
    propose(proposer, writer)
    assert propose(proposer, reader, depth=2).token_ids == tuple(TEXT[44:46])


def test_an_output_outlives_its_sequence() -> None:
    proposer = Retrieval()
    sequence = decoding([1], TEXT)
    propose(proposer, sequence)
    del sequence
    gc.collect()
    assert len(proposer._readers) == 0
    assert len(propose(proposer, decoding([2], TEXT[5:9]))) > 0
