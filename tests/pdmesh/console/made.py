"""Spans and routers as a mesh would have them, without one: OTLP as our processes encode it, and a servicer with a script."""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio

from pdmesh.console.otlp import TRACES
from pdmesh.runtime.telemetry.otlp import encode_request, encode_resource
from pdmesh.runtime.telemetry.propagation import SpanContext
from pdmesh.runtime.telemetry.spans import Attributes, Event, Kind, Span
from pdmesh.runtime.telemetry.tracing import Tracing
from pdmesh.v1 import common_pb2, mesh_pb2, worker_pb2
from pdmesh.v1.mesh_pb2_grpc import MeshServicer, add_MeshServicer_to_server

if TYPE_CHECKING:
    from collections.abc import Sequence

MS = 1_000_000
MODEL = "smollm2-135m-instruct"
WORKERS = {
    "prefill-0": (worker_pb2.ROLE_PREFILL,),
    "prefill-1": (worker_pb2.ROLE_PREFILL,),
    "decode-0": (worker_pb2.ROLE_DECODE,),
    "decode-1": (worker_pb2.ROLE_DECODE,),
}


@dataclass(frozen=True)
class Made:
    """One request that was served; times in milliseconds, its beginning in nanoseconds since 1970."""

    start_ns: int
    router: str = "router-0"
    prefill: str = "prefill-0"
    decode: str = "decode-0"
    request_id: str = "r-1"
    route: float = 0.8
    admission: float = 0.0
    reserve: float = 1.4
    prefill_queue: float = 2.0
    prefill_compute: float = 40.0
    first_token_return: float = 0.9
    kv_exposed: float = 4.0
    decode_queue: float = 1.0
    tpot: float = 9.0
    input_tokens: int = 320
    cached_tokens: int = 64
    output_tokens: int = 48
    goals: tuple[float, float] = (0, 0)
    error: str = ""
    caller: SpanContext | None = None
    model: str = MODEL

    @property
    def ttft(self) -> float:
        """The sum of its parts."""
        return self.route + self.admission + self.reserve + self.prefill_queue + self.prefill_compute + self.first_token_return

    @property
    def total(self) -> float:
        """Until its last token."""
        return self.ttft + self.kv_exposed + self.decode_queue + self.tpot * max(0, self.output_tokens - 1)

    def attributes(self) -> dict[str, Any]:
        """Of its `generate` span."""
        given: dict[str, Any] = {
            "gen_ai.operation.name": "chat",
            "gen_ai.provider.name": "pdmesh",
            "gen_ai.request.model": self.model,
            "gen_ai.response.model": self.model,
            "gen_ai.response.id": self.request_id,
            "gen_ai.usage.input_tokens": self.input_tokens,
            "gen_ai.usage.output_tokens": self.output_tokens,
            "pdmesh.priority": "standard",
            "pdmesh.mode": "remote",
            "pdmesh.prefill.worker": self.prefill,
            "pdmesh.decode.worker": self.decode,
            "pdmesh.cached_tokens": self.cached_tokens,
            "pdmesh.kv.bytes": 46_080 * self.input_tokens,
            "pdmesh.kv.transport": "shm",
            "pdmesh.ttft_ms": self.ttft,
            "pdmesh.tpot_ms": self.tpot,
            "pdmesh.timing.route_ms": self.route,
            "pdmesh.timing.admission_queue_ms": self.admission,
            "pdmesh.timing.reserve_ms": self.reserve,
            "pdmesh.timing.prefill_queue_ms": self.prefill_queue,
            "pdmesh.timing.prefill_compute_ms": self.prefill_compute,
            "pdmesh.timing.first_token_return_ms": self.first_token_return,
            "pdmesh.timing.retry_ms": 0.0,
            "pdmesh.timing.kv_exposed_ms": self.kv_exposed,
            "pdmesh.timing.decode_queue_ms": self.decode_queue,
        }
        if any(self.goals):
            is_met = self.ttft <= self.goals[0] and self.tpot <= self.goals[1] and not self.error
            given |= {"pdmesh.slo.ttft_ms": self.goals[0], "pdmesh.slo.tpot_ms": self.goals[1], "pdmesh.slo.met": is_met}
        return given


class _Taken:
    def __init__(self) -> None:
        self.spans: list[Span] = []

    def put(self, span: Span) -> None:
        """Kept."""
        self.spans.append(span)

    def close(self, timeout_s: float) -> None:
        """Nothing."""


def spans_of(made: Made) -> dict[tuple[str, str], list[Span]]:
    """Its spans by (service, instance), with the names and parents of those of a real mesh."""
    taken: dict[tuple[str, str], _Taken] = defaultdict(_Taken)

    def at(offset_ms: float) -> int:
        return made.start_ns + round(offset_ms * MS)

    router, prefiller, decoder = (
        Tracing(taken[key])
        for key in (("pdmesh-router", made.router), ("pdmesh-worker", made.prefill), ("pdmesh-worker", made.decode))
    )
    root = router.begin(
        f"generate {made.model}", made.caller, start_ns=made.start_ns, kind=Kind.SERVER, attributes=made.attributes()
    )
    placed = made.route + made.admission
    reserved = placed + made.reserve
    drawn = reserved + made.prefill_queue + made.prefill_compute
    router.record("route", root.context, at(0), at(made.route))
    if made.admission:
        router.record("admission", root.context, at(made.route), at(placed))
    attempt = router.begin("attempt", root.context, start_ns=at(placed), attributes={"pdmesh.attempt": 1})
    reserve = router.begin("reserve", attempt.context, start_ns=at(placed), kind=Kind.CLIENT)
    decoder.record("submit", reserve.context, at(placed + 0.2), at(reserved - 0.2), kind=Kind.SERVER)
    reserve.end(at(reserved))
    call = router.begin("prefill", attempt.context, start_ns=at(reserved), kind=Kind.CLIENT)
    served = prefiller.begin("prefill", call.context, start_ns=at(reserved), kind=Kind.SERVER)
    started = reserved + made.prefill_queue
    prefiller.record("prefill.queue", served.context, at(reserved), at(started))
    chunks = [
        Event("chunk", at(started + made.prefill_compute * (step + 1) / 3), {"pdmesh.step": step, "pdmesh.tokens": 86})
        for step in range(3)
    ]
    prefiller.record(
        "prefill.compute", served.context, at(started), at(drawn), events=chunks, attributes={"pdmesh.cached_tokens": 64}
    )
    for group in range(3):
        begun, moved = drawn - made.prefill_compute * (0.6 - 0.3 * group), made.kv_exposed * (0.4 + 0.3 * group)
        bytes_: Attributes = {"pdmesh.kv.bytes": 4_915_200, "pdmesh.kv.transport": "shm", "pdmesh.kv.layer_start": 10 * group}
        prefiller.record("kv.push", served.context, at(begun), at(begun + moved), attributes=bytes_)
    committed = drawn + made.kv_exposed
    prefiller.record("kv.exposed", served.context, at(drawn), at(committed))
    served.end(at(committed))
    call.end(at(committed))
    attempt.end(at(drawn))
    router.record("first_token_return", root.context, at(drawn), at(drawn + made.first_token_return))
    decode = decoder.begin("decode", attempt.context, start_ns=at(committed))
    decoder.record("decode.queue", decode.context, at(committed), at(committed + made.decode_queue))
    decode.set({"pdmesh.tokens": made.output_tokens})
    decode.end(at(made.total))
    if made.error:
        root.fail(made.error, "it broke on purpose")
    root.end(at(made.total))
    return {key: each.spans for key, each in taken.items()}


def exports(made: Made) -> list[bytes]:
    """Its spans as the calls of its processes: the router's, which holds the request's own span, comes last."""
    by_process = spans_of(made)
    ordered = sorted(by_process, key=lambda key: key[0] == "pdmesh-router")
    return [encoded(key[0], key[1], by_process[key]) for key in ordered]


def encoded(service: str, instance: str, spans: Sequence[Span]) -> bytes:
    """One call's body."""
    resource = encode_resource(service, {"service.instance.id": instance}, {})
    return encode_request(spans, resource, 0).SerializeToString()


async def send(address: str, *bodies: bytes) -> list[bytes]:
    """By OTLP; the answers."""
    async with grpc.aio.insecure_channel(address) as channel:
        call: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(TRACES)
        return [await call(body, timeout=60) for body in bodies]


def some_requests(count: int, end_ns: int, seed: int = 3) -> list[Made]:
    """As many as a busy mesh would have had in the last minutes, some of them slow; the last of them ends at `end_ns` or so."""
    dice = random.Random(seed)
    found = []
    for number in range(count):
        is_slow = dice.random() < 0.12
        made = Made(
            start_ns=0,
            prefill=dice.choice(("prefill-0", "prefill-0", "prefill-1")),
            decode=dice.choice(("decode-0", "decode-1")),
            request_id=f"r-{number:04d}",
            route=dice.lognormvariate(-0.2, 0.4),
            admission=dice.lognormvariate(4.2, 0.6) if is_slow and dice.random() < 0.5 else 0.0,
            reserve=dice.lognormvariate(0.3, 0.4),
            prefill_queue=dice.lognormvariate(4.5, 0.5) if is_slow else dice.lognormvariate(1.0, 0.9),
            prefill_compute=dice.lognormvariate(3.7, 0.45),
            first_token_return=dice.lognormvariate(-0.1, 0.3),
            kv_exposed=dice.lognormvariate(1.2, 0.5),
            tpot=dice.lognormvariate(2.3, 0.25),
            input_tokens=dice.randint(40, 900),
            cached_tokens=dice.choice((0, 0, 32, 64)),
            output_tokens=dice.randint(8, 60),
            goals=(150, 16),
            error="UNAVAILABLE" if dice.random() < 0.01 else "",
        )
        found.append(replace(made, start_ns=end_ns - round((count - number) * 0.12e9) - round(made.total * MS)))
    return found


@dataclass
class Script:
    """What a made router says."""

    problem: grpc.StatusCode | None = None
    num_waiting: int = 1
    hangs: bool = False  # after the first token
    left: asyncio.Event = field(default_factory=asyncio.Event)  # a client has
    metadata: list[dict[str, str]] = field(default_factory=list)
    requests: list[mesh_pb2.ChatRequest] = field(default_factory=list)


class MadeRouter(MeshServicer):
    """Answers what the console asks."""

    Generate = Tokenize = ListModels = None  # type: ignore[assignment]

    Embed = LoadAdapter = UnloadAdapter = ListAdapters = ReleaseSession = UpdateWeights = None  # type: ignore[assignment]
    SetTrafficSplit = SetServing = SendWeights = None  # type: ignore[assignment]

    def __init__(self, script: Script) -> None:
        self.script = script

    async def GetStatus(self, request: mesh_pb2.GetStatusRequest, context: Any) -> mesh_pb2.GetStatusResponse:
        if self.script.problem is not None:
            await context.abort(self.script.problem, "on purpose")
        return mesh_pb2.GetStatusResponse(
            router_id="router-0",
            workers=[_worker(name, roles, self.script) for name, roles in WORKERS.items()],
            num_inflight=7,
            max_inflight=64,
            registry_connected=True,
            objectives=[mesh_pb2.Objective(model=MODEL, ttft_ms=150, tpot_ms=16, quantile=0.95)],
        )

    async def Explain(self, request: mesh_pb2.ExplainRequest, context: Any) -> mesh_pb2.ExplainResponse:
        return mesh_pb2.ExplainResponse(decisions=[_decision(number) for number in range(6)])

    async def Chat(self, request: mesh_pb2.ChatRequest, context: Any) -> AsyncIterator[mesh_pb2.GenerateResponse]:
        self.script.requests.append(request)
        self.script.metadata.append(dict(context.invocation_metadata()))
        yield mesh_pb2.GenerateResponse(started=mesh_pb2.Started(request_id="r-chat", seed=1, model=MODEL))
        for index, text in enumerate(("Paris", " is", " it.")):
            yield mesh_pb2.GenerateResponse(delta=mesh_pb2.Delta(first_index=index, token_ids=[index], text=text))
            if self.script.hangs:
                context.add_done_callback(lambda _: self.script.left.set())
                await asyncio.Event().wait()
        usage = mesh_pb2.Usage(prompt_tokens=4, completion_tokens=3)
        timings = mesh_pb2.Timings(ttft_ns=50 * MS, tpot_ns=9 * MS, total_ns=70 * MS)
        yield mesh_pb2.GenerateResponse(completed=mesh_pb2.Completed(usage=usage, timings=timings))


def _worker(name: str, roles: Sequence[worker_pb2.Role.ValueType], script: Script) -> mesh_pb2.WorkerStatus:
    number = list(WORKERS).index(name)
    load = worker_pb2.LoadReport(
        worker_id=name,
        roles=roles,
        num_running=3 + 2 * number,
        num_waiting=script.num_waiting,
        num_total_blocks=2048,
        num_free_blocks=1700 - 350 * number,
        num_cached_blocks=420 + 60 * number,
        num_prefilled_tokens=180_000 if number < 2 else 0,
        num_prefix_hit_tokens=61_000 if number < 2 else 0,
        max_num_seqs=16,
    )
    info = worker_pb2.WorkerInfo(
        worker_id=name, address=f"127.0.0.1:4000{number}", roles=roles, identity=common_pb2.Identity(model=MODEL), max_num_seqs=16
    )
    info.engine, redraws = ("pdmesh", ()) if number < 3 else ("other", (worker_pb2.ENGINE_LACK_REPRODUCIBLE,))
    info.lacks.extend(redraws)
    reused: dict[str, float] = {}
    if number < 2:  # the second one's tier was slower than its model of computing
        reused = {"fetched_tokens": (12_400, 0)[number], "restored_tokens": 5_200, "saved_s": (6.5, -0.44)[number]}
    return mesh_pb2.WorkerStatus(info=info, load=load, alive=True, report_age_ms=120, **reused)  # type: ignore[arg-type]


def _decision(number: int) -> mesh_pb2.Decision:
    candidates = [
        mesh_pb2.Candidate(
            decode_worker_id="decode-1", prefill_worker_id="prefill-0", ttft_ms=46.2, tpot_ms=9.1, cost=0.061, chosen=True,
            prefill_cached_tokens=64,
        ),
        mesh_pb2.Candidate(
            decode_worker_id="decode-0", prefill_worker_id="prefill-1", ttft_ms=61.0, tpot_ms=9.4, cost=0.08, note="longer queue",
        ),
    ]  # fmt: skip
    return mesh_pb2.Decision(
        request_id=f"r-{number:04d}", age_ms=800 + 1900 * number, policy="slo", num_tokens=320, num_workers=4, decision_us=90.0,
        reason="prefill-0 holds 64 of 320 tokens and has the shortest queue: least cost of 4 candidates", candidates=candidates,
    )  # fmt: skip


@asynccontextmanager
async def made_router(script: Script | None = None) -> AsyncIterator[str]:
    """A served MadeRouter; its address."""
    server = grpc.aio.server()
    add_MeshServicer_to_server(MadeRouter(script or Script()), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)
