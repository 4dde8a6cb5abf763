"""From the frontend's messages to an engine's: token ids only, since the gateway detokenizes; and the mesh described as one
engine."""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from pdmesh.third_party.vllm import vllm_engine_pb2 as pb
from pdmesh.v1 import common_pb2, mesh_pb2, worker_pb2
from router.api.protocol_errors import package_version
from router.tokenization.prepared_request import ServedModel

_REASONS = {
    common_pb2.FINISH_REASON_STOP: "stop",
    common_pb2.FINISH_REASON_LENGTH: "length",
    common_pb2.FINISH_REASON_ABORT: "abort",
}
ABORTED = "abort"


@dataclass
class _Choice:
    """Hold all output of a choice so far."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[common_pb2.Logprobs] = field(default_factory=list)
    finish_reason: common_pb2.FinishReason.ValueType = common_pb2.FINISH_REASON_UNSPECIFIED
    stop_reason: str = ""


class Answer:
    """Collect one request's messages and make its responses."""

    def __init__(self, request: pb.GenerateRequest) -> None:
        self._request = request
        self._started = mesh_pb2.Started()
        self._choices = [_Choice()]

    def responses(self, message: mesh_pb2.GenerateResponse) -> Iterator[pb.GenerateResponse]:
        """Yield the responses to `message`: a chunk, or with the last message the end of every choice. The ends wait for that
        message because they give the number of cached tokens."""
        kind = message.WhichOneof("event")
        if kind == "started":
            self._started = message.started
            # After `started`, because only then has `n` been checked.
            self._choices = [_Choice() for _ in range(self._request.sampling_params.n or 1)]
        elif kind == "delta":
            self._add(message.delta)
            if self._request.stream and message.delta.token_ids:
                yield self._chunk(message.delta)
        else:
            yield from self._ends(message.completed.usage.cached_tokens)

    def aborted(self) -> Iterator[pb.GenerateResponse]:
        """Yield the end of an aborted request, with the output that it had."""
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
        """Set the stop that ended the choice, if it was one of the request's own; an end-of-sequence token is not."""
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


# The mesh described as one engine: model, server, load.


def model_info(model: ServedModel, folder: Path, max_context: int) -> pb.GetModelInfoResponse:
    """Return the model's description. `folder` holds the model's config.json. Raises OSError, ValueError."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return pb.GetModelInfoResponse(
        model_path=model.name,
        is_generation=True,
        max_context_length=max_context,
        vocab_size=model.tokenizer.vocab_size,
        served_model_name=model.name,
        tokenizer_path=model.name,
        model_type=str(config.get("model_type", "")),
        architectures=[str(name) for name in config.get("architectures") or ()],
        eos_token_ids=sorted(model.eos_token_ids),
        pad_token_id=_id(config.get("pad_token_id")),
        bos_token_id=_id(config.get("bos_token_id")),
        max_req_input_len=max_context - 1,
        default_sampling_params_json=json.dumps(dict(model.sampling_defaults)) if model.sampling_defaults else "",
    )


def _id(value: object) -> int:
    return value if isinstance(value, int) and value >= 0 else 0


def decoders(status: mesh_pb2.GetStatusResponse, model: str) -> list[mesh_pb2.WorkerStatus]:
    """Return the workers that decode `model` now."""
    return [
        worker
        for worker in status.workers
        if worker.alive and worker.info.identity.model == model and worker_pb2.ROLE_DECODE in worker.load.roles
    ]


def server_info(
    status: mesh_pb2.GetStatusResponse, model: str, *, uptime_s: float, last_request_at: float
) -> pb.GetServerInfoResponse:
    """Return the server's description. `last_request_at`: seconds of Unix time, 0 before the first request."""
    workers = decoders(status, model)
    layouts = [worker.info.layout for worker in workers]
    return pb.GetServerInfoResponse(
        active_requests=status.num_inflight,
        last_receive_timestamp=last_request_at,
        uptime_seconds=uptime_s,
        server_type="pdmesh",
        data_parallel_size=1,
        kv_cache_dtype=layouts[0].kv_dtype if layouts else "",
        block_size=layouts[0].block_size if layouts else 0,
        max_num_seqs=_max_num_seqs(workers),
        constrained_decoding_start="first_token",
    )


def loads(status: mesh_pb2.GetStatusResponse, model: str) -> pb.GetLoadsResponse:
    """Return the sum over the decode workers, and this router's queue."""
    workers = decoders(status, model)
    running = sum(worker.load.num_running for worker in workers)
    waiting = status.num_queued + sum(worker.load.num_waiting + worker.load.num_reserved for worker in workers)
    total = sum(worker.load.num_total_blocks * worker.info.layout.block_size for worker in workers)
    free = sum(worker.load.num_free_blocks * worker.info.layout.block_size for worker in workers)
    load = pb.SchedulerLoad(
        num_running_reqs=running,
        num_waiting_reqs=waiting,
        num_total_reqs=running + waiting,
        num_used_tokens=_int32(total - free),
        max_total_num_tokens=_int32(total),
        token_usage=(total - free) / total if total else 0.0,
        max_running_requests=_max_num_seqs(workers),
        num_waiting_uncached_tokens=_int32(sum(worker.load.num_waiting_tokens for worker in workers)),
    )
    return pb.GetLoadsResponse(timestamp=datetime.now(UTC).isoformat(), version=package_version(), dp_rank_count=1, loads=[load])


def _max_num_seqs(workers: Iterable[mesh_pb2.WorkerStatus]) -> int:
    return _int32(sum(worker.load.max_num_seqs or worker.info.max_num_seqs for worker in workers))


def _int32(value: int) -> int:
    return max(0, min(value, 2**31 - 1))
