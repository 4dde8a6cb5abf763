"""From the frontend's messages to an engine's: token ids only, the gateway makes the text."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from pdmesh.third_party.vllm import vllm_engine_pb2 as pb
from pdmesh.v1 import common_pb2, mesh_pb2

_REASONS = {common_pb2.FINISH_REASON_STOP: "stop", common_pb2.FINISH_REASON_LENGTH: "length"}
ABORTED = "abort"


@dataclass
class _Choice:
    """All of a choice's output so far."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[common_pb2.Logprobs] = field(default_factory=list)
    finish_reason: common_pb2.FinishReason.ValueType = common_pb2.FINISH_REASON_UNSPECIFIED
    stop_reason: str = ""


class Answer:
    """Collects one request's messages and makes its responses."""

    def __init__(self, request: pb.GenerateRequest) -> None:
        self._request = request
        self._started = mesh_pb2.Started()
        self._choices = [_Choice()]

    def responses(self, message: mesh_pb2.GenerateResponse) -> Iterator[pb.GenerateResponse]:
        """The responses that `message` makes possible: a chunk, or the end of every choice with the last message. The ends
        wait for it because they tell the cached tokens."""
        kind = message.WhichOneof("event")
        if kind == "started":
            self._started = message.started
            # Not before: `n` has been checked now.
            self._choices = [_Choice() for _ in range(self._request.sampling_params.n or 1)]
        elif kind == "delta":
            self._add(message.delta)
            if self._request.stream and message.delta.token_ids:
                yield self._chunk(message.delta)
        else:
            yield from self._ends(message.completed.usage.cached_tokens)

    def aborted(self) -> Iterator[pb.GenerateResponse]:
        """The end of a request that was aborted, with what there was of it."""
        return self._ends(0)

    def _add(self, delta: mesh_pb2.Delta) -> None:
        choice = self._choices[delta.choice]
        choice.token_ids.extend(delta.token_ids)
        choice.logprobs.extend(delta.logprobs)
        choice.finish_reason, choice.stop_reason = delta.finish_reason, delta.stop_reason

    def _chunk(self, delta: mesh_pb2.Delta) -> pb.GenerateResponse:
        chunk = pb.GenerateStreamChunk(
            token_ids=delta.token_ids,
            prompt_tokens=self._started.num_prompt_tokens,
            completion_tokens=len(delta.token_ids),
            output_logprobs=_logprobs(delta.logprobs),
            index=delta.choice,
        )
        return pb.GenerateResponse(chunk=chunk)

    def _ends(self, cached_tokens: int) -> Iterator[pb.GenerateResponse]:
        for index, choice in enumerate(self._choices):
            complete = pb.GenerateComplete(
                output_ids=choice.token_ids,
                finish_reason=_REASONS.get(choice.finish_reason, ABORTED),
                prompt_tokens=self._started.num_prompt_tokens,
                completion_tokens=len(choice.token_ids),
                cached_tokens=cached_tokens,
                output_logprobs=_logprobs(choice.logprobs),
                index=index,
            )
            self._add_stop(complete, choice)
            yield pb.GenerateResponse(complete=complete)

    def _add_stop(self, complete: pb.GenerateComplete, choice: _Choice) -> None:
        """What of the request's own stops it was; an end-of-sequence token is none of them."""
        params = self._request.sampling_params
        if choice.finish_reason != common_pb2.FINISH_REASON_STOP:
            return
        if choice.token_ids and choice.token_ids[-1] in params.stop_token_ids:
            complete.matched_token_id = choice.token_ids[-1]
        elif choice.stop_reason in params.stop:
            complete.matched_stop_str = choice.stop_reason


def _logprobs(entries: Sequence[common_pb2.Logprobs]) -> pb.OutputLogProbs | None:
    if not entries:
        return None
    return pb.OutputLogProbs(
        token_logprobs=[entry.chosen.logprob for entry in entries],
        token_ids=[entry.chosen.token_id for entry in entries],
        top_logprobs=[
            pb.TopLogProbs(
                values=[candidate.logprob for candidate in entry.top], token_ids=[candidate.token_id for candidate in entry.top]
            )
            for entry in entries
        ],
    )
