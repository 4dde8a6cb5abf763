"""Calls of each RPC, with which the search for those that break something begins."""

from __future__ import annotations

from grpc_health.v1 import health_pb2

from pdmesh.third_party.kserve import grpc_service_pb2
from pdmesh.third_party.vllm import smg_common_pb2, vllm_engine_pb2
from pdmesh.v1 import common_pb2, decode_pb2, mesh_pb2, prefill_pb2, transfer_pb2, worker_pb2
from tests.fuzzing.mesh_calls import CANCEL, FILL, FRAMED, SAME_STREAM, WAIT, record

PARAMS = common_pb2.SamplingParams(max_tokens=5, top_k=3, seed=3)
TOKENS = common_pb2.TokenRequest(model="m", prompt_token_ids=[70] * 40, sampling=PARAMS)
IDENTITY = common_pb2.Identity(model="m")


def _submit(mode: mesh_pb2.PrefillMode.ValueType, request_id: str = "r") -> bytes:
    submit = decode_pb2.SubmitRequest(
        request_id=request_id, router_id="a", attempt=1, mode=mode, epoch=5, identity=IDENTITY, request=TOKENS
    )
    if mode == mesh_pb2.PREFILL_MODE_LOCAL:
        submit.holder.CopyFrom(prefill_pb2.KVHolder(address="10.0.0.1:7000", epoch=5, num_tokens=32))
    return record("Submit", submit, FILL | WAIT)


def _push(message: transfer_pb2.TransferMessage, flags: int = 0) -> bytes:
    return record("Push", message, FILL | FRAMED | flags)


ATTACH = record("Attach", decode_pb2.AttachRequest(router_id="a"))
RENEW = record("Attach", decode_pb2.AttachRequest(router_id="a", waiting_request_ids=["r"]), FILL | SAME_STREAM, delay=4)
CANCELLED = record("Cancel", decode_pb2.CancelRequest(request_id="r", reason="no"))
RESERVATION = common_pb2.Reservation(
    reservation_id="r.1", epoch=5, attempt=1, token=b"x", layout=common_pb2.KVLayout(block_size=16)
)
PREFILL = prefill_pb2.PrefillRequest(request_id="r", request=TOKENS, identity=IDENTITY, reservation=RESERVATION)
HELD = prefill_pb2.PrefillRequest(
    request_id="r",
    request=TOKENS,
    identity=IDENTITY,
    reservation=RESERVATION,
    holder=prefill_pb2.KVHolder(address="10.0.0.1:7000", epoch=5, num_tokens=32),
)
WARMED = worker_pb2.WarmPrefixRequest(request=TOKENS, holder_address="10.0.0.1:7000", holder_epoch=5)
HELLO = transfer_pb2.TransferHello(
    protocol_version=3, reservation_id="r.1", epoch=7, attempt=1, token=b"x", identity=IDENTITY, layout=RESERVATION.layout
)
PART = transfer_pb2.PartHeader(part_id=0, layer_start=0, layer_end=1, block_end=3, num_bytes=384)
TO_EMBED = common_pb2.TokenRequest(model="m", prompt_token_ids=[70, 71], sampling=common_pb2.SamplingParams(max_tokens=1, seed=1))
ROLES = (worker_pb2.ROLE_PREFILL, worker_pb2.ROLE_DECODE)

WORKER_SEEDS = (
    ATTACH + _submit(mesh_pb2.PREFILL_MODE_LOCAL) + RENEW + CANCELLED,
    ATTACH + _submit(mesh_pb2.PREFILL_MODE_REMOTE) + record("Prefill", PREFILL, FILL | WAIT) + RENEW,
    ATTACH
    + _submit(mesh_pb2.PREFILL_MODE_REMOTE)
    + _push(transfer_pb2.TransferMessage(hello=HELLO))
    + _push(transfer_pb2.TransferMessage(part=PART), SAME_STREAM)
    + record("Push", transfer_pb2.TransferChunk(data=bytes(384)), SAME_STREAM)
    + _push(transfer_pb2.TransferMessage(commit=transfer_pb2.TransferCommit(num_tokens=40)), SAME_STREAM)
    + CANCELLED,
    record("PrefillService.Embed", prefill_pb2.EmbedPromptRequest(request_id="e", request=TO_EMBED), FILL | WAIT)
    + record("WorkerControl.Watch", worker_pb2.WatchRequest(period_ms=50), FILL | CANCEL, delay=9),
    record("SetRoles", worker_pb2.SetRolesRequest(roles=ROLES[:1], drain_timeout_ms=100), FILL | WAIT)
    + ATTACH
    + _submit(mesh_pb2.PREFILL_MODE_LOCAL)
    + record("SetRoles", worker_pb2.SetRolesRequest(roles=ROLES)),
    record("GetInfo", worker_pb2.GetInfoRequest())
    + record("ListBlocks", worker_pb2.ListBlocksRequest())
    + record("KeepTraces", worker_pb2.KeepTracesRequest(trace_ids=[b"a" * 16]))
    + record("WorkerControl.LoadAdapter", worker_pb2.LoadAdapterRequest(model="m", name="a", folder="a", digest="b" * 64))
    + record("WorkerControl.UnloadAdapter", worker_pb2.UnloadAdapterRequest(model="m", name="a"))
    + record("WorkerControl.ListAdapters", worker_pb2.ListAdaptersRequest())
    + record("ReleaseRetained", worker_pb2.ReleaseRetainedRequest(tenant="t", session_id="s")),
    ATTACH
    + _submit(mesh_pb2.PREFILL_MODE_REMOTE)
    + record(
        "SendBlocks", worker_pb2.SendBlocksRequest(hashes=[b"x" * 16], reservation=RESERVATION, identity=IDENTITY), FILL | WAIT
    )
    + record("Prefill", HELD, FILL | WAIT)
    + record("WarmPrefix", WARMED, FILL | WAIT),
    record("Health.Check", health_pb2.HealthCheckRequest())
    + record("Health.Watch", health_pb2.HealthCheckRequest(), CANCEL)
    + record("Health.List", health_pb2.HealthListRequest()),
)

OPTIONS = mesh_pb2.RequestOptions(request_id="r", tenant="t", session_id="s", kv_retention_s=2)
GENERATE = mesh_pb2.GenerateRequest(model="m", text="hello", sampling=PARAMS, options=OPTIONS)
TURN = mesh_pb2.ChatMessage(role="user", content="a")
CHAT = mesh_pb2.ChatRequest(model="m", messages=[TURN], sampling=PARAMS, options=mesh_pb2.RequestOptions(request_id="c"))
INPUT = grpc_service_pb2.ModelInferRequest.InferInputTensor(
    name="text_input", datatype="BYTES", shape=[1], contents=grpc_service_pb2.InferTensorContents(bytes_contents=[b"a"])
)
INFER = grpc_service_pb2.ModelInferRequest(model_name="m", id="k", inputs=[INPUT])
VLLM = vllm_engine_pb2.GenerateRequest(
    request_id="v", text="a", sampling_params=vllm_engine_pb2.SamplingParams(max_tokens=3), stream=True
)

ROUTER_SEEDS = (
    record("Mesh.Generate", GENERATE, FILL, delay=2)
    + record("Explain", mesh_pb2.ExplainRequest(request_id="r"))
    + record("ReleaseSession", mesh_pb2.ReleaseSessionRequest(session_id="s", tenant="t", model="m")),
    record("Mesh.Generate", GENERATE, FILL | CANCEL, delay=1)
    + record("Chat", CHAT, FILL | WAIT)
    + record("Explain", mesh_pb2.ExplainRequest(latest=4))
    + record("Explain", mesh_pb2.ExplainRequest(chat=CHAT)),
    record("Tokenize", mesh_pb2.TokenizeRequest(model="m", messages=[TURN]))
    + record("ListModels", mesh_pb2.ListModelsRequest())
    + record("Mesh.Embed", mesh_pb2.EmbedRequest(model="m", inputs=[mesh_pb2.EmbedInput(text="a")], dimensions=2))
    + record("GetStatus", mesh_pb2.GetStatusRequest()),
    record("Mesh.LoadAdapter", worker_pb2.LoadAdapterRequest(model="m", name="a", folder="a"))
    + record("Mesh.UnloadAdapter", worker_pb2.UnloadAdapterRequest(model="m", name="a"))
    + record("Mesh.ListAdapters", worker_pb2.ListAdaptersRequest()),
    record("ModelInfer", INFER, FILL | WAIT)
    + record("ModelStreamInfer", INFER, FILL)
    + record("ModelStreamInfer", INFER, FILL | SAME_STREAM)
    + record("ModelConfig", grpc_service_pb2.ModelConfigRequest(name="sim"))
    + record("ModelMetadata", grpc_service_pb2.ModelMetadataRequest(name="sim"))
    + record("ModelReady", grpc_service_pb2.ModelReadyRequest(name="m"))
    + record("RepositoryIndex", grpc_service_pb2.RepositoryIndexRequest())
    + record("ServerLive", grpc_service_pb2.ServerLiveRequest())
    + record("ServerReady", grpc_service_pb2.ServerReadyRequest())
    + record("ServerMetadata", grpc_service_pb2.ServerMetadataRequest()),
    record("VllmEngine.Generate", VLLM, FILL)
    + record("Abort", vllm_engine_pb2.AbortRequest(request_ids=["v"]))
    + record(
        "VllmEngine.Embed",
        vllm_engine_pb2.EmbedRequest(request_id="e", tokenized=vllm_engine_pb2.TokenizedInput(input_ids=[70, 71])),
    )
    + record("GetModelInfo", vllm_engine_pb2.GetModelInfoRequest())
    + record("GetServerInfo", vllm_engine_pb2.GetServerInfoRequest())
    + record("GetLoads", vllm_engine_pb2.GetLoadsRequest(include=["core"]))
    + record("FlushCache", smg_common_pb2.FlushCacheRequest())
    + record("GetTokenizer", smg_common_pb2.GetTokenizerRequest())
    + record("HealthCheck", vllm_engine_pb2.HealthCheckRequest()),
)
