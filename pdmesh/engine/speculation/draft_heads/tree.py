"""From guesses that know nothing of each other (Medusa heads) to the tree that is likeliest to be followed far."""

from __future__ import annotations

import heapq
from collections.abc import Sequence as Ranked

from pdmesh.engine.speculation.draft import NOTHING, ROOT, Draft

Guesses = Ranked[Ranked[tuple[int, float]]]  # of each depth: tokens and their chances, the likeliest first


def best_tree(guesses: Guesses, max_tokens: int, least_chance: float, proposer: str) -> Draft:
    """The `max_tokens` nodes with the largest chance to be kept, none smaller than `least_chance`; a node's chance is the product
    of its branch's. A node is never likelier than its parent, so best first finds them (Li et al., EAGLE-2, 2024)."""
    nodes: list[tuple[int, int, float]] = []  # parent, token, its own chance
    heap: list[tuple[float, int, int, int]] = []  # minus the chance to be kept, parent, depth, rank among the guesses there

    def offer(kept: float, parent: int, depth: int, rank: int) -> None:
        if depth < len(guesses) and rank < len(guesses[depth]) and (chance := kept * guesses[depth][rank][1]) >= least_chance:
            heapq.heappush(heap, (-chance, parent, depth, rank))

    offer(1.0, ROOT, 0, 0)
    while heap and len(nodes) < max_tokens:
        minus_chance, parent, depth, rank = heapq.heappop(heap)
        token_id, own_chance = guesses[depth][rank]
        nodes.append((parent, token_id, own_chance))
        if own_chance > 0:
            offer(-minus_chance / own_chance, parent, depth, rank + 1)
        offer(-minus_chance, len(nodes) - 1, depth + 1, 0)
    return _depth_first(nodes, proposer) if nodes else NOTHING


def _depth_first(nodes: list[tuple[int, int, float]], proposer: str) -> Draft:
    """Nodes in the order in which they were found, as the order that a Draft has."""
    children: dict[int, list[int]] = {}
    for index, (parent, _, _) in enumerate(nodes):
        children.setdefault(parent, []).append(index)
    place, waiting = {ROOT: ROOT}, children.get(ROOT, [])[::-1]
    while waiting:
        index = waiting.pop()
        place[index] = len(place) - 1
        waiting += children.get(index, [])[::-1]
    order = [index for index in place if index != ROOT]
    return Draft(
        tuple(nodes[index][1] for index in order),
        tuple(place[nodes[index][0]] for index in order),
        tuple(nodes[index][2] for index in order),
        proposer,
    )
