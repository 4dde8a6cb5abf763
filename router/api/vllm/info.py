"""The mesh described as one engine: model, server, load."""

import json
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path

from pdmesh.third_party.vllm import vllm_engine_pb2 as pb
from pdmesh.v1 import mesh_pb2, worker_pb2
from router.api.protocol_errors import package_version
from router.tokenization.served_model import ServedModel


def model_info(model: ServedModel, folder: Path, max_context: int) -> pb.GetModelInfoResponse:
    """`folder`: with the model's config.json. Raises OSError, ValueError."""
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
    )


def _id(value: object) -> int:
    return value if isinstance(value, int) and value >= 0 else 0


def decoders(status: mesh_pb2.GetStatusResponse, model: str) -> list[mesh_pb2.WorkerStatus]:
    """The workers that decode `model` now."""
    return [
        worker
        for worker in status.workers
        if worker.alive and worker.info.identity.model == model and worker_pb2.ROLE_DECODE in worker.load.roles
    ]


def server_info(
    status: mesh_pb2.GetStatusResponse, model: str, *, uptime_s: float, last_request_at: float
) -> pb.GetServerInfoResponse:
    """`last_request_at`: seconds of Unix time, 0 before the first one."""
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
    """The sum over the workers that decode, and this router's queue."""
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
