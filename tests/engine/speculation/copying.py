"""Sequences that decode without a model: the test says what is drawn."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from collections.abc import Sequence as Sequence_

from pdmesh.engine.request import EngineRequest
from pdmesh.engine.scheduler.sequence import Phase, Sequence, SequenceGroup
from pdmesh.engine.speculation.draft import Draft, Verified
from pdmesh.engine.speculation.proposer import Ask, Proposer
from pdmesh.sampling_params import SamplingParams

_numbers = itertools.count()


def decoding(prompt: Sequence_[int], output: Sequence_[int] = (), cache_root: bytes = b"") -> Sequence:
    """A sequence in the middle of its output."""
    number = next(_numbers)
    request = EngineRequest(f"r{number}", tuple(prompt), SamplingParams(max_tokens=10_000), cache_root=cache_root)
    [sequence] = SequenceGroup(request, number, Phase.ACTIVE).sequences
    sequence.output.extend(output)
    return sequence


def propose(
    proposer: Proposer,
    sequence: Sequence,
    depth: int = 8,
    tokens: int = 16,
    least_chance: float = 0.0,
    *,
    may_try: bool = False,
) -> Draft:
    [draft] = proposer.propose([Ask(sequence, depth, tokens, least_chance, may_try)])
    assert len(draft) <= tokens
    assert max(draft.depths, default=0) <= depth
    assert all(0.0 <= chance <= 1.0 for chance in draft.chances)
    return draft


def verify(proposer: Proposer, sequence: Sequence, draft: Draft, future: Sequence_[int], wrong: int = -1) -> Verified:
    """A step with this draft: the model draws `future`, and `wrong` behind anything else."""

    def draw(path: list[int]) -> int:
        return future[len(path)] if path == list(future[: len(path)]) and len(path) < len(future) else wrong

    return step(proposer, sequence, draft, draw)


def step(proposer: Proposer, sequence: Sequence, draft: Draft, draw: Callable[[list[int]], int]) -> Verified:
    """A step with this draft: the model draws `draw(path)` behind the last known token and this path of the draft."""
    paths = [[], *([draft.token_ids[at] for at in draft.branch(index)] for index in range(len(draft)))]
    verified = Verified(draft, tuple(draw(path) for path in paths))
    sequence.output.extend(verified.new_tokens)
    proposer.learn(sequence, verified, None)
    return verified


def run(proposer: Proposer, sequence: Sequence, future: Sequence_[int], least_chance: float = 0.0) -> int:
    """Draws all of `future` with what the proposer drafts; returns in how many steps."""
    steps = 0
    left = list(future)
    while left:
        depth = min(8, len(left) - 1)
        draft = propose(proposer, sequence, depth, least_chance=least_chance) if depth else Draft()
        verified = verify(proposer, sequence, draft, left)
        assert list(verified.new_tokens) == left[: len(verified.new_tokens)]
        left = left[len(verified.new_tokens) :]
        steps += 1
    return steps
