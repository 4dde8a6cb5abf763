"""What became of the faults of a round, and what clients saw meanwhile; goes into a line of JSON and out of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Self

from tests.chaos.tally import Tally


@dataclass(frozen=True)
class Dealt:
    """A fault that was dealt. `began` (the blow) and `ended` (the victim serves again): seconds of the monotonic clock.

    `serving_s`: from ready to serving, of a process started again. `stall_s`: the longest wait of any client for a token while it
    lasted; `own_stall_s`: the same over waits during which no other fault lasted. None: nobody waited long.
    """

    number: int
    kind: str
    state: str
    victim: str
    began: float
    ended: float
    serving_s: float | None = None
    stall_s: float | None = None
    own_stall_s: float | None = None


@dataclass(frozen=True)
class Round:
    """A batch of faults, from a mesh at rest to a mesh at rest. `not_dealt`: numbers of faults whose state was not reached.
    `problems`: in words, whatever must not be; `blocks_leaked`: held when nobody asked any more."""

    campaign: str
    number: int
    elapsed_s: float
    dealt: Sequence[Dealt]
    not_dealt: Sequence[int]
    tally: Tally
    blocks_leaked: int = 0
    problems: Sequence[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        # By hand: `asdict` cannot copy the tally's Counter.
        return {**vars(self), "dealt": [asdict(fault) for fault in self.dealt], "tally": self.tally.to_json()}

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Self:
        dealt = [Dealt(**each) for each in content["dealt"]]
        return cls(**{**content, "dealt": dealt, "tally": Tally.from_json(content["tally"])})


def with_stalls(dealt: Sequence[Dealt], waits: Sequence[tuple[float, float]]) -> list[Dealt]:
    """The faults with the longest of `waits`, (begin, end), that overlap each of them."""
    stalls: dict[int, float] = {}
    own_stalls: dict[int, float] = {}
    for begin, end in waits:
        overlapping = [fault.number for fault in dealt if begin < fault.ended and end > fault.began]
        for number in overlapping:
            stalls[number] = max(stalls.get(number, 0.0), end - begin)
        if len(overlapping) == 1:
            own_stalls[overlapping[0]] = max(own_stalls.get(overlapping[0], 0.0), end - begin)
    return [replace(fault, stall_s=stalls.get(fault.number), own_stall_s=own_stalls.get(fault.number)) for fault in dealt]
