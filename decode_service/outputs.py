"""The tokens drawn for a request, kept until its router has them.

One store serves both ordinary frames and a router that comes back: a frame takes what lies behind `num_sent`, a resume point
moves `num_sent` back. A slow router's frames merge by themselves, because nothing is taken before a frame can be sent.

    token_ids   [ t0 t1 t2 | t3 t4 ]
    output index  first_index        num_sent = 3: the next frame starts at first_index + 3
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from pdmesh.engine.outputs import FinishReason, SequenceUpdate, TokenLogprobs
from pdmesh.v1 import common_pb2, decode_pb2

_FINISH_REASONS: dict[FinishReason | None, common_pb2.FinishReason.ValueType] = {
    None: common_pb2.FINISH_REASON_UNSPECIFIED,
    FinishReason.STOP: common_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: common_pb2.FINISH_REASON_LENGTH,
}


@dataclass
class ChoiceOutput:
    """One choice's tokens from output index `first_index` on."""

    choice: int
    first_index: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[common_pb2.Logprobs] = field(default_factory=list)  # one per token, or none at all
    finish_reason: common_pb2.FinishReason.ValueType = common_pb2.FINISH_REASON_UNSPECIFIED
    num_sent: int = 0
    finish_sent: bool = False
    num_drafted: int = 0
    num_accepted: int = 0

    @property
    def finished(self) -> bool:
        return self.finish_reason != common_pb2.FINISH_REASON_UNSPECIFIED

    def append(self, update: SequenceUpdate) -> None:
        """Adds a step's tokens. Raises ValueError when they do not continue the choice: an engine that does so is broken."""
        expected = self.first_index + len(self.token_ids)
        if update.index != expected:
            raise ValueError(f"{update.request_id}, choice {self.choice}: the engine drew index {update.index}, not {expected}")
        self.token_ids.extend(update.token_ids)
        if update.logprobs:
            self.logprobs.extend(map(wire_logprobs, update.logprobs))
        if update.num_drafted:
            self.num_drafted += update.num_drafted
            self.num_accepted += update.num_accepted
        if update.finish_reason is not None:
            self.finish_reason = _FINISH_REASONS[update.finish_reason]

    def append_committed(self, token_id: int, finish_reason: common_pb2.FinishReason.ValueType, *, wants_logprobs: bool) -> None:
        """Adds the token that came with the commit. Its log-probability stayed on prefill: here it is unknown, NaN."""
        self.token_ids.append(token_id)
        if wants_logprobs:
            self.logprobs.append(common_pb2.Logprobs(chosen=common_pb2.TokenLogprob(token_id=token_id, logprob=math.nan)))
        self.finish_reason = finish_reason

    def take(self, request_id: str) -> decode_pb2.SequenceOutput | None:
        """What has not been sent yet, now counted as sent. None: nothing new. What was drafted is told as a total: a message that
        is lost, or sent again, changes no sum."""
        start, end = self.num_sent, len(self.token_ids)
        if start == end and (self.finish_sent or not self.finished):
            return None
        self.num_sent, self.finish_sent = end, self.finished
        return decode_pb2.SequenceOutput(
            request_id=request_id,
            choice=self.choice,
            first_index=self.first_index + start,
            token_ids=self.token_ids[start:],
            logprobs=self.logprobs[start:],
            finish_reason=self.finish_reason,
            num_drafted=self.num_drafted,
            num_accepted=self.num_accepted,
        )

    def rewind(self, next_index: int) -> None:
        """The router needs `next_index` next. What lies before the first token here came from elsewhere and cannot be sent."""
        self.num_sent = min(max(next_index - self.first_index, 0), len(self.token_ids))
        self.finish_sent = False


class RequestOutput:
    """The choices of one request that are generated here."""

    def __init__(self, request_id: str, first_indexes: Mapping[int, int]) -> None:
        """`first_indexes`: for each choice that is not finished yet, the output index of its next token."""
        self._request_id = request_id
        self.choices = {choice: ChoiceOutput(choice, index) for choice, index in first_indexes.items()}

    @property
    def finished(self) -> bool:
        return all(choice.finished for choice in self.choices.values())

    def take(self) -> list[decode_pb2.SequenceOutput]:
        """What is new of all choices, now counted as sent."""
        taken = (choice.take(self._request_id) for choice in self.choices.values())
        return [output for output in taken if output is not None]

    def rewind(self, next_indexes: Mapping[int, int]) -> None:
        """Sends again from a router's resume points: choice → next output index. A choice that is not named starts over."""
        for choice in self.choices.values():
            choice.rewind(next_indexes.get(choice.choice, 0))


def wire_logprobs(logprobs: TokenLogprobs) -> common_pb2.Logprobs:
    """The engine's log-probabilities of one position as they travel."""
    chosen, value = logprobs.chosen
    return common_pb2.Logprobs(
        chosen=common_pb2.TokenLogprob(token_id=chosen, logprob=value),
        top=[common_pb2.TokenLogprob(token_id=token, logprob=top) for token, top in logprobs.top],
    )
