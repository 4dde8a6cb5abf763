"""The first tokens of a prefill, as they come from the engine, as they go to the router, and as they go to decode."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from pdmesh.engine.outputs import FinishReason, PrefillTiming, RequestStarted, SequenceUpdate, TokenLogprobs
from pdmesh.v1 import common_pb2, prefill_pb2, transfer_pb2

_FINISH_REASONS: dict[FinishReason | None, common_pb2.FinishReason.ValueType] = {
    None: common_pb2.FINISH_REASON_UNSPECIFIED,
    FinishReason.STOP: common_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: common_pb2.FINISH_REASON_LENGTH,
}


@dataclass(frozen=True)
class FirstTokens:
    """One update per choice. `drawn_ns` is when the engine's step ended (monotonic)."""

    updates: tuple[SequenceUpdate, ...]
    timing: PrefillTiming
    drawn_ns: int

    @property
    def all_finished(self) -> bool:
        """Nothing is left to decode."""
        return all(update.finish_reason is not None for update in self.updates)

    def for_router(self) -> list[prefill_pb2.FirstToken]:
        return [_first_token(update) for update in self.updates]

    def for_decode(self) -> list[transfer_pb2.CommittedChoice]:
        return [
            transfer_pb2.CommittedChoice(
                choice=update.choice,
                index=update.index,
                token_id=update.token_ids[0],
                finish_reason=_FINISH_REASONS[update.finish_reason],
                draft_state=update.draft_state,
            )
            for update in self.updates
        ]

    def queue_ns(self, received_ns: int) -> int:
        """From the receipt of the request to its first step."""
        return self.timing.opened_ns - received_ns + self.timing.queue_ns

    def timings(self, received_ns: int) -> common_pb2.PrefillTimings:
        """At the hand-over to gRPC, which is now. Where a part ends, the next begins with the same reading of the clock: threads
        that want the interpreter may wait for it between two readings, and what passes there would be in no part."""
        now_ns = time.monotonic_ns()
        return common_pb2.PrefillTimings(
            prefill_queue_ns=self.queue_ns(received_ns),
            prefill_compute_ns=self.timing.compute_ns,
            return_ns=now_ns - self.drawn_ns,
            service_ns=now_ns - received_ns,
            num_cached_tokens=self.timing.num_cached_tokens,
            num_computed_tokens=self.timing.num_computed_tokens,
            num_steps=self.timing.num_steps,
        )


class FirstTokensSink:
    """Collects the engine's results of one prefill. All first tokens are drawn in one step, which also ends the prefill."""

    def __init__(self) -> None:
        self._updates: list[SequenceUpdate] = []
        self._done: asyncio.Future[FirstTokens] = asyncio.get_running_loop().create_future()

    def on_update(self, update: SequenceUpdate) -> None:
        self._updates.append(update)

    def on_started(self, started: RequestStarted, ended_ns: int) -> None:
        assert started.timing is not None, f"{started.request_id} was prefilled here"
        if not self._done.done():
            self._done.set_result(FirstTokens(tuple(self._updates), started.timing, ended_ns))

    async def wait(self, timeout_s: float) -> FirstTokens | None:
        """None: not yet, after `timeout_s`."""
        await asyncio.wait((self._done,), timeout=timeout_s)
        return self._done.result() if self._done.done() else None


def _first_token(update: SequenceUpdate) -> prefill_pb2.FirstToken:
    token = prefill_pb2.FirstToken(
        choice=update.choice,
        index=update.index,
        token_id=update.token_ids[0],
        finish_reason=_FINISH_REASONS[update.finish_reason],
    )
    if update.logprobs:
        token.logprobs.CopyFrom(_wire_logprobs(update.logprobs[0]))
    return token


def _wire_logprobs(logprobs: TokenLogprobs) -> common_pb2.Logprobs:
    chosen, value = logprobs.chosen
    return common_pb2.Logprobs(
        chosen=common_pb2.TokenLogprob(token_id=chosen, logprob=value),
        top=[common_pb2.TokenLogprob(token_id=token, logprob=top) for token, top in logprobs.top],
    )
