"""How far the model would have followed the heads, on outputs that they have not learned from."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from pdmesh.engine.sampling.counter_rng import gumbel
from pdmesh.engine.speculation.draft_heads.reference import HeadMaths
from tools.draft_heads.data import Outputs


@dataclass(frozen=True)
class Followed:
    """`accepted[d]`: of the drafts whose first d tokens were drawn, the share whose next one was too."""

    num_drafts: int
    accepted: tuple[float, ...]

    @property
    def tokens_per_draft(self) -> float:
        """Kept tokens of a draft of full length, on average."""
        kept, total = 1.0, 0.0
        for share in self.accepted:
            kept *= share
            total += kept
        return total


def follow(maths: HeadMaths, outputs: Outputs, *, greedy: bool, most_drafts: int = 4096) -> Followed:
    """Drafts of full length behind tokens of the greedy (or the sampled) outputs, with the noise that these were drawn with."""
    places = _places(outputs, greedy, maths.heads.depth)
    places = places[:: max(1, len(places) // most_drafts)]
    states = outputs.states[[at for at, _ in places]].float()
    followed, accepted = places, []
    begin = states
    for depth in range(maths.heads.depth):
        if not followed:
            break
        is_chain = maths.heads.kind == "recurrent"
        given = [int(outputs.tokens[at + depth if is_chain else at]) for at, _ in followed]
        states = maths.advance(0, states, given) if is_chain else maths.advance(depth, begin, given)
        guesses = _guess(maths, states, outputs, followed, depth)
        hits = [int(outputs.tokens[at + depth + 1]) == guess for (at, _), guess in zip(followed, guesses, strict=True)]
        accepted.append(sum(hits) / len(hits))
        kept = [index for index, hit in enumerate(hits) if hit]
        followed, states, begin = [followed[index] for index in kept], states[kept], begin[kept]
    return Followed(len(places), tuple(accepted))


def _places(outputs: Outputs, greedy: bool, depth: int) -> list[tuple[int, int]]:
    """Tokens that `depth` others follow in their output: their place among all, and which output it is."""
    return [
        (at, number)
        for number in range(len(outputs))
        if (float(outputs.temperatures[number]) == 0.0) == greedy
        for at in range(int(outputs.starts[number]), int(outputs.starts[number + 1]) - depth)
    ]


def _guess(maths: HeadMaths, states: Tensor, outputs: Outputs, places: list[tuple[int, int]], depth: int) -> list[int]:
    ids = maths.heads.token_ids
    guesses: list[int] = []
    for first in range(0, len(places), 256):
        part = places[first : first + 256]
        scores = maths.score(states[first : first + 256].contiguous())
        if all(float(outputs.temperatures[number]) == 0.0 for _, number in part):
            guesses += ids[scores.best].tolist()
            continue
        for row, (at, number) in zip(scores.logits, part, strict=True):
            index = at - int(outputs.starts[number]) + depth + 1
            noise = gumbel(int(outputs.seeds[number]), 0, index, ids)
            guesses.append(int(ids[(row / float(outputs.temperatures[number]) + noise).argmax()]))
    return guesses
