"""Drafts under a grammar: what may come behind each drafted token, and what of a draft the grammar allows at all."""

from __future__ import annotations

from engine.grammar import Bits, Matcher
from engine.speculation.draft import ROOT, Draft


def allowed_on_tree(matcher: Matcher, draft: Draft) -> list[Bits]:
    """Tokens that may come behind the root, then behind each token of a draft that follows the grammar. `matcher` stays put."""
    matchers = {ROOT: matcher}
    for index, (parent, token_id) in enumerate(zip(draft.parents, draft.token_ids, strict=True)):
        matchers[index] = matchers[parent].copy()
        matchers[index].take(token_id)
    return [matchers[index].allowed() for index in range(ROOT, len(draft))]


def follow(matcher: Matcher, draft: Draft) -> Draft:
    """What of the draft the grammar allows."""
    matchers = {ROOT: matcher}
    wanted = []
    for index, (parent, token_id) in enumerate(zip(draft.parents, draft.token_ids, strict=True)):
        at = matchers.get(parent)
        wanted.append(at is not None and _is_allowed(at.allowed(), token_id))
        if at is not None and wanted[-1]:
            matchers[index] = at.copy()
            matchers[index].take(token_id)
    return draft.keep(wanted)


def _is_allowed(bits: Bits, token_id: int) -> bool:
    return bool(bits[token_id // 32] >> (token_id % 32) & 1)
