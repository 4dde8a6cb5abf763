"""From the frontend's messages to responses: the whole output at once, or one response for each delta."""

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from pdmesh.third_party.kserve import grpc_service_pb2 as pb
from pdmesh.v1 import common_pb2, mesh_pb2
from router.api.kserve.requests import Ask
from router.api.kserve.tensors import VERSION, Element, add_output

FINAL = "triton_final_response"
_REASONS = {
    common_pb2.FINISH_REASON_UNSPECIFIED: b"",
    common_pb2.FINISH_REASON_STOP: b"stop",
    common_pb2.FINISH_REASON_LENGTH: b"length",
    common_pb2.FINISH_REASON_ABORT: b"abort",
}


@dataclass
class Piece:
    """Hold output of one choice: a delta, or all of its deltas together."""

    choice: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[common_pb2.Logprobs] = field(default_factory=list)
    prompt_logprobs: list[common_pb2.Logprobs] = field(default_factory=list)  # of one choice
    finish_reason: common_pb2.FinishReason.ValueType = common_pb2.FINISH_REASON_UNSPECIFIED
    stop_reason: str = ""

    def add(self, delta: mesh_pb2.Delta) -> None:
        """Append the next delta of the same choice."""
        self.text += delta.text
        self.token_ids.extend(delta.token_ids)
        self.logprobs.extend(delta.logprobs)
        self.prompt_logprobs.extend(delta.prompt_logprobs)
        self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason


class Answer:
    """Collect one request's messages and make its responses."""

    def __init__(self, ask: Ask) -> None:
        self._ask = ask
        self._started = mesh_pb2.Started()
        self._completed = mesh_pb2.Completed()
        self._choices: dict[int, Piece] = {}
        self._num_open = ask.message.sampling.n or 1

    def take(self, message: mesh_pb2.GenerateResponse) -> None:
        """Take in one message of a request whose output is wanted as a whole."""
        kind = message.WhichOneof("event")
        if kind == "delta":
            self._choices.setdefault(message.delta.choice, Piece(message.delta.choice)).add(message.delta)
        else:
            self._take_frame(message)

    def whole(self) -> pb.ModelInferResponse:
        """Return the response, after every message was taken in."""
        pieces = [self._choices[choice] for choice in sorted(self._choices)]
        for piece in pieces:
            piece.text = self._ask.prefix + piece.text
        response = self._response(pieces)
        response.parameters[FINAL].bool_param = not self._ask.empty_final
        self._add_totals(response)
        return response

    def piece(self, message: mesh_pb2.GenerateResponse) -> pb.ModelInferResponse | None:
        """Return the streamed response to a message; None where there is none. The last one is marked as final: it is an empty
        one after the output if that was asked for, else the last output."""
        kind = message.WhichOneof("event")
        if kind != "delta":
            self._take_frame(message)
            return self.empty_final() if kind == "completed" and self._ask.empty_final else None
        piece = Piece(message.delta.choice)
        piece.add(message.delta)
        self._num_open -= bool(piece.finish_reason)
        response = self._response([piece])
        response.parameters[FINAL].bool_param = not self._num_open and not self._ask.empty_final
        return response

    def _take_frame(self, message: mesh_pb2.GenerateResponse) -> None:
        if message.WhichOneof("event") == "started":
            self._started = message.started
        else:
            self._completed = message.completed

    def empty_final(self) -> pb.ModelInferResponse:
        """Return the final response without outputs, for requests that ask for one."""
        response = self._response([])
        response.parameters[FINAL].bool_param = True
        self._add_totals(response)
        return response

    def _response(self, pieces: Sequence[Piece]) -> pb.ModelInferResponse:
        response = pb.ModelInferResponse(model_name=self._started.model, model_version=VERSION, id=self._ask.id)
        if pieces:
            for name in self._ask.outputs:
                add_output(response, name, self._elements(name, pieces))
        return response

    def _elements(self, name: str, pieces: Sequence[Piece]) -> Sequence[Element]:
        if name in _OF_PIECES:
            return [_OF_PIECES[name](piece) for piece in pieces]
        if name == "output_ids":
            return [token_id for piece in pieces for token_id in piece.token_ids]
        return [_OF_ANSWER[name](self._started, self._completed.usage)]

    def _add_totals(self, response: pb.ModelInferResponse) -> None:
        """Add token counts and the mesh's own timings as parameters."""
        usage, timings = self._completed.usage, self._completed.timings
        totals: Mapping[str, int] = {
            "num_input_tokens": usage.prompt_tokens,
            "num_output_tokens": usage.completion_tokens,
            "num_cached_tokens": usage.cached_tokens,
            "num_drafted_tokens": usage.drafted_tokens,
            "num_accepted_tokens": usage.accepted_tokens,
            "ttft_ns": timings.ttft_ns,
            "tpot_ns": timings.tpot_ns,
            "total_ns": timings.total_ns,
            "seed": self._started.seed,
        }
        for name, value in totals.items():
            response.parameters[name].uint64_param = value
        response.parameters["request_id"].string_param = self._started.request_id


def failed(request: pb.ModelInferRequest, code: str, message: str) -> pb.ModelStreamInferResponse:
    """Return the streamed response to a request that failed; `code` is the name of a gRPC status."""
    response = pb.ModelStreamInferResponse(error_message=f"[{code}] {message}")
    infer = response.infer_response
    infer.model_name, infer.id = request.model_name, request.id
    infer.parameters[FINAL].bool_param = True
    infer.parameters["grpc_status"].string_param = code
    return response


def _logprobs(entries_of_tokens: Iterable[common_pb2.Logprobs]) -> bytes:
    """Return JSON: for each token its id, text, log-probability, and the most likely tokens with theirs."""
    entries = [
        {**_logprob(entry.chosen), "top_logprobs": [_logprob(candidate) for candidate in entry.top]}
        for entry in entries_of_tokens
    ]
    return json.dumps(entries, ensure_ascii=False, allow_nan=False).encode()


def _logprob(entry: common_pb2.TokenLogprob) -> dict[str, object]:
    logprob = entry.logprob if math.isfinite(entry.logprob) else None
    return {"token_id": entry.token_id, "token": entry.text, "logprob": logprob}


_OF_PIECES: dict[str, Callable[[Piece], Element]] = {
    "text_output": lambda piece: piece.text.encode(),
    "finish_reason": lambda piece: _REASONS[piece.finish_reason],
    "stop_reason": lambda piece: piece.stop_reason.encode(),
    "logprobs": lambda piece: _logprobs(piece.logprobs),
    "prompt_logprobs": lambda piece: _logprobs(piece.prompt_logprobs),
    "cumulative_logprob": lambda piece: sum(entry.chosen.logprob for entry in piece.logprobs),
    "index": lambda piece: piece.choice,
    "num_output_tokens": lambda piece: len(piece.token_ids),
}
_OF_ANSWER: dict[str, Callable[[mesh_pb2.Started, mesh_pb2.Usage], int]] = {
    "num_input_tokens": lambda started, usage: started.num_prompt_tokens,
    "num_cached_tokens": lambda started, usage: usage.cached_tokens,
    "num_drafted_tokens": lambda started, usage: usage.drafted_tokens,
    "num_accepted_tokens": lambda started, usage: usage.accepted_tokens,
    "seed": lambda started, usage: started.seed,
}
