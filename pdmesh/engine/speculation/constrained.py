"""Drafts under a grammar: what may come behind each drafted token, and what of a draft the grammar allows at all.

The sequence keeps the places that it was asked for (`Sequence.matcher_behind`), and a place what may come behind it. So whatever
was found to cut a draft is there when the step draws, however much of the draft was cut off in between.
"""

from __future__ import annotations

from pdmesh.engine.sampling.grammar import Bits
from pdmesh.engine.scheduler.sequence import Sequence
from pdmesh.engine.speculation.draft import ROOT, Draft


def allowed_on_tree(sequence: Sequence, draft: Draft) -> list[Bits | None]:
    """Tokens that may come behind the root, then behind each token of a draft that follows the grammar; None without one."""
    nodes = range(ROOT, len(draft))
    if sequence.group.request.grammar is None:
        return [None for _ in nodes]
    return [sequence.matcher_behind(_path(draft, node)).allowed() for node in nodes]


def follow(sequence: Sequence, draft: Draft) -> Draft:
    """What of the draft the sequence's grammar allows: all of it without one."""
    if sequence.group.request.grammar is None or not draft:
        return draft
    here = sequence.matcher_behind(())
    wanted = [False] * len(draft)
    for run in draft.branches:
        path = draft.branch(run[-1])  # from the root on: a run begins behind another's token
        for index in path[: here.num_possible([draft.token_ids[index] for index in path])]:
            wanted[index] = True
    return draft.keep(wanted)


def _path(draft: Draft, node: int) -> tuple[int, ...]:
    """The tokens from below the root to this one, itself included."""
    return tuple([draft.token_ids[index] for index in draft.branch(node)])
