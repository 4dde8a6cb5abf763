"""A stock engine as a worker: DecodeService and WorkerControl, served to this router alone, in its own process.

The engine computes prompts itself (LOCAL): the worker has no transports, and refuses REMOTE. What its tokens depend on is not
known here, so it is declared as not reproducible, and a request that it loses may go on at any worker of the model.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable
from typing import TYPE_CHECKING, Any, cast

import grpc.aio

from pdmesh.planning.latency_fit import LatencyFit
from pdmesh.planning.latency_message import latency_message
from pdmesh.planning.latency_model import Work, prefill_context
from pdmesh.runtime.config import ConfigError
from pdmesh.runtime.errors import Aborted, FailedPrecondition, ResourceExhausted, Unavailable, Unimplemented
from pdmesh.runtime.rpc.channel import Channels
from pdmesh.v1 import common_pb2, decode_pb2, decode_pb2_grpc, mesh_pb2, worker_pb2, worker_pb2_grpc
from router.config import RouterConfig
from router.engine_bridge import translation
from router.engine_bridge.address import EngineAddress
from router.engine_bridge.link import FLAG, EngineLink, EngineProcess, NotAnEngine
from router.engine_bridge.local_channel import LocalChannel
from router.engine_bridge.requests import EngineRequest, Outbox
from router.fleet.change_notifier import wait_at_most
from router.routing.cost_model import NEUTRAL

if TYPE_CHECKING:
    from pdmesh.v1.decode_pb2_grpc import _MaybeAsyncIterator, _ServicerContext
    from pdmesh.v1.worker_pb2_grpc import _MaybeAsyncIterator as _ControlMessages
    from pdmesh.v1.worker_pb2_grpc import _ServicerContext as _ControlContext

ANSWER_WAIT_S = 0.02
"""Submit waits so long for an engine's refusal; a later one ends the request after its Submit."""
RETRY_DELAY_S = 0.1
LEASE_MS = 5000
DEFAULT_PERIOD_S, DEFAULT_REPORT_PERIOD_S = 0.1, 0.2
ROLES = (worker_pb2.ROLE_DECODE,)
LACKS = (
    worker_pb2.ENGINE_LACK_PACES,
    worker_pb2.ENGINE_LACK_REPRODUCIBLE,
    worker_pb2.ENGINE_LACK_PROMPT_SHARES,
    worker_pb2.ENGINE_LACK_EMBEDDINGS,
    worker_pb2.ENGINE_LACK_RETENTION,
)
_STOCK = "a stock engine has its roles, its cache, its adapters and its weights to itself"


class EngineSpeed:
    """Fit the latency model of one engine. The times include the way to the engine and its queue, which a router pays as well."""

    def __init__(self) -> None:
        self._fit = LatencyFit(NEUTRAL)
        self._leader: tuple[EngineRequest, int] | None = None  # the choice whose chunks count the engine's steps
        self._last_s = 0.0

    def first_token(self, request: EngineRequest, running: Callable[[], Work]) -> None:
        """Record the prefill of a request. `running()`: what decodes beside it."""
        num_tokens, num_cached = request.num_prompt_tokens, request.num_cached_tokens
        work = running()._replace(
            prefill_tokens=max(1, num_tokens - num_cached), prefill_context=prefill_context(num_cached, num_tokens)
        )
        self._fit.observe(work, (request.first_ns - request.sent_ns) / 1e9)
        self._leader = None  # the step that others were in was no mere decode step

    def step(self, request: EngineRequest, choice: int, running: Callable[[], Work]) -> None:
        """Record new tokens of a choice: of one of them, whose chunks stand for the steps. `running()`: what decodes now."""
        leader, now_s = (request, choice), time.monotonic()
        if self._leader == leader:
            self._fit.observe(running(), now_s - self._last_s)
        elif self._leader is not None and not self._leader[0].is_over and self._leader[1] in self._leader[0].next_index:
            return
        self._leader, self._last_s = leader, now_s

    def message(self) -> worker_pb2.LatencyModel | None:
        """Return the model for a load report; None before the first measurement."""
        model = self._fit.model(time.monotonic())
        return latency_message(model) if model.num_steps else None


class EngineBridge(decode_pb2_grpc.DecodeServiceServicer, worker_pb2_grpc.WorkerControlServicer):
    """Show one engine as a worker, over `channel`. Used on the event loop only."""

    def __init__(
        self, address: EngineAddress, models: Iterable[str], *, period_s: float, timeout_s: float, shares_cache: bool
    ) -> None:
        """Create it. `models` that the router serves; `period_s` of looking at the engine; `timeout_s`: see `EngineLink`;
        `shares_cache`: tenants may share the engine's prefix cache."""
        self.target = address.target
        self.link = EngineLink(address, models, period_s=period_s, timeout_s=timeout_s, on_down=self._lost)
        self._shares_cache = shares_cache
        self._speed = EngineSpeed()
        self._outbox: Outbox | None = None  # of the router's Attach stream
        self._running: dict[str, EngineRequest] = {}
        self._serial = 0
        self._num_steps = self._num_generated = self._num_prefilled = self._num_cached = 0
        local = LocalChannel(self.target)
        decode_pb2_grpc.add_DecodeServiceServicer_to_server(self, cast("grpc.aio.Server", local))
        worker_pb2_grpc.add_WorkerControlServicer_to_server(self, cast("grpc.aio.Server", local))
        self.channel = cast("grpc.aio.Channel", local)

    # WorkerControl

    async def GetInfo(self, request: worker_pb2.GetInfoRequest, context: _ControlContext) -> worker_pb2.WorkerInfo:
        process = self._alive()
        facts = process.facts
        return worker_pb2.WorkerInfo(
            worker_id=f"engine-{self.target}",
            epoch=process.epoch,
            address=self.target,
            roles=ROLES,
            home_roles=ROLES,
            identity=facts.identity,
            layout=facts.layout,
            max_context=facts.max_context,
            max_num_seqs=facts.max_num_seqs,
            num_blocks=self._num_blocks(process),
            engine=facts.server,
            lacks=LACKS,
        )

    async def Watch(self, request: worker_pb2.WatchRequest, context: _ControlContext) -> AsyncIterator[worker_pb2.LoadReport]:
        process = self._alive()
        period_s = request.period_ms / 1000 or DEFAULT_REPORT_PERIOD_S
        while not process.lost.is_set():
            yield self._report(process)
            await wait_at_most(process.lost, period_s)
        raise Unavailable(self.link.problem)

    async def KeepTraces(self, request: worker_pb2.KeepTracesRequest, context: _ControlContext) -> worker_pb2.KeepTracesResponse:
        return worker_pb2.KeepTracesResponse()  # there are no spans here: the router's own show the request

    async def SetRoles(self, request: worker_pb2.SetRolesRequest, context: _ControlContext) -> worker_pb2.WorkerInfo:
        raise Unimplemented(_STOCK)

    def ListBlocks(self, request: worker_pb2.ListBlocksRequest, context: _ControlContext) -> AsyncIterator[worker_pb2.BlockList]:
        raise Unimplemented(_STOCK)

    async def LoadAdapter(self, request: worker_pb2.LoadAdapterRequest, context: _ControlContext) -> common_pb2.AdapterInfo:
        raise Unimplemented(_STOCK)

    async def UnloadAdapter(
        self, request: worker_pb2.UnloadAdapterRequest, context: _ControlContext
    ) -> worker_pb2.UnloadAdapterResponse:
        raise Unimplemented(_STOCK)

    async def ListAdapters(self, request: worker_pb2.ListAdaptersRequest, context: _ControlContext) -> worker_pb2.AdapterList:
        return worker_pb2.AdapterList()

    async def ReleaseRetained(
        self, request: worker_pb2.ReleaseRetainedRequest, context: _ControlContext
    ) -> worker_pb2.ReleaseRetainedResponse:
        return worker_pb2.ReleaseRetainedResponse()  # a stock engine evicts in its own order, and retains nothing

    async def SendBlocks(self, request: worker_pb2.SendBlocksRequest, context: _ControlContext) -> worker_pb2.SendBlocksResponse:
        raise Unimplemented(_STOCK)

    async def WarmPrefix(self, request: worker_pb2.WarmPrefixRequest, context: _ControlContext) -> worker_pb2.WarmPrefixResponse:
        raise Unimplemented(_STOCK)

    async def UpdateWeights(
        self, request: worker_pb2.UpdateWeightsRequest, context: _ControlContext
    ) -> worker_pb2.UpdateWeightsResponse:
        raise Unimplemented(_STOCK)

    async def SendWeights(
        self, request_iterator: _ControlMessages[worker_pb2.SendWeightsRequest], context: _ControlContext
    ) -> worker_pb2.UpdateWeightsResponse:
        raise Unimplemented(_STOCK)

    def ReadWeights(
        self, request: worker_pb2.ReadWeightsRequest, context: _ControlContext
    ) -> AsyncIterator[worker_pb2.ReadWeightsResponse]:
        raise Unimplemented(_STOCK)

    async def SetServing(self, request: worker_pb2.SetServingRequest, context: _ControlContext) -> worker_pb2.SetServingResponse:
        raise Unimplemented(_STOCK)

    def WatchBlocks(
        self, request: worker_pb2.WatchBlocksRequest, context: _ControlContext
    ) -> AsyncIterator[worker_pb2.BlockEvents]:
        raise Unimplemented(_STOCK)

    # DecodeService

    async def Submit(self, request: decode_pb2.SubmitRequest, context: _ServicerContext) -> decode_pb2.SubmitResponse:
        received_ns = time.monotonic_ns()
        process, outbox = self._alive(), self._outbox
        self._check(request, process)
        if outbox is None:
            raise Unavailable(f"no stream is attached to engine {self.target}")
        known = self._running.get(request.request_id)
        if known is None or self._is_replaced(known, request.attempt):
            await self._begin(request, process, outbox, received_ns)
        return decode_pb2.SubmitResponse(reservation=_granted(request, process))

    async def Cancel(self, request: decode_pb2.CancelRequest, context: _ServicerContext) -> decode_pb2.CancelResponse:
        known = self._running.get(request.request_id)
        if known is not None:
            known.stop()
        return decode_pb2.CancelResponse(found=known is not None)

    async def Attach(
        self, request_iterator: _MaybeAsyncIterator[decode_pb2.AttachRequest], context: _ServicerContext
    ) -> AsyncIterator[decode_pb2.Frame]:
        first, process = await anext(request_iterator), self._alive()
        outbox = self._outbox = Outbox()
        self._refuse_to_resume(first, outbox)
        period_s = first.period_ms / 1000 or DEFAULT_PERIOD_S
        reader = asyncio.create_task(_drop(request_iterator))  # in one process nobody falls silent alone
        try:
            while not process.lost.is_set():
                yield outbox.take(decode_pb2.Frame(epoch=process.epoch, num_steps=self._num_steps))
                await wait_at_most(outbox.news, period_s)
            yield outbox.take(decode_pb2.Frame(epoch=process.epoch, num_steps=self._num_steps))
            raise Unavailable(self.link.problem)
        finally:
            reader.cancel()
            self._detach(outbox)

    def _alive(self) -> EngineProcess:
        if self.link.current is None:
            raise Unavailable(f"engine {self.target}: {self.link.problem}")
        return self.link.current

    def _check(self, submit: decode_pb2.SubmitRequest, process: EngineProcess) -> None:
        """Raise FailedPrecondition, naming the field, for what this engine cannot do."""
        if submit.mode != mesh_pb2.PREFILL_MODE_LOCAL:
            raise FailedPrecondition("mode", "a stock engine computes prompts itself; use LOCAL")
        if submit.epoch and submit.epoch != process.epoch:
            raise FailedPrecondition("epoch", f"{submit.epoch:#x} is a former connection to engine {self.target}")
        if submit.request.model != process.facts.model:
            raise FailedPrecondition("request.model", f"this engine serves {process.facts.model!r}")
        translation.check(submit.request, shares_cache=self._shares_cache)

    def _is_replaced(self, known: EngineRequest, attempt: int) -> bool:
        """End the attempt that is known if `attempt` is newer, and return whether it is. Raises Aborted for an older one."""
        if attempt < known.submit.attempt:
            raise Aborted(f"attempt {attempt} is older than {known.submit.attempt}")
        if attempt > known.submit.attempt:
            known.stop()
        return attempt > known.submit.attempt

    async def _begin(self, submit: decode_pb2.SubmitRequest, process: EngineProcess, outbox: Outbox, received_ns: int) -> None:
        """Start a request. Raises MeshError: no room, or the engine's own refusal if it comes at once."""
        self._serial += 1
        calls = translation.engine_calls(submit.request, f"{submit.request_id}-{self._serial}")
        self._check_room(sum(len(call.choices) for call in calls), process)
        request = EngineRequest(submit, received_ns, outbox, self._ended, self._first_token, self._step)
        self._running[submit.request_id] = request
        request.start(calls, self.link.generate, submit.time_left_ms / 1000 or None)
        try:
            await wait_at_most(request.answered, ANSWER_WAIT_S)
        except asyncio.CancelledError:
            request.stop()
            raise
        request.is_submitted = True
        if request.failure is not None:
            raise request.failure

    def _check_room(self, num_new: int, process: EngineProcess) -> None:
        num_seqs = sum(len(request.next_index) for request in self._running.values())
        if num_seqs and num_seqs + num_new > process.facts.max_num_seqs:
            problem = f"engine {self.target} runs {num_seqs} of {process.facts.max_num_seqs} sequences"
            raise ResourceExhausted(problem, retry_delay_s=RETRY_DELAY_S)

    def _refuse_to_resume(self, first: decode_pb2.AttachRequest, outbox: Outbox) -> None:
        """Report requests of an earlier stream as lost: they ended with it."""
        for request_id in {point.request_id for point in first.resume_points}:
            outbox.failed(request_id, 0, Unavailable(f"the stream of engine {self.target} broke off"))

    def _detach(self, outbox: Outbox) -> None:
        """End what was submitted for this stream."""
        if self._outbox is outbox:
            self._outbox = None
        for request in [each for each in self._running.values() if each.outbox is outbox]:
            request.stop()

    def _lost(self, process: EngineProcess) -> None:
        for request in list(self._running.values()):
            request.stop(Unavailable(f"engine {self.target} is lost: {self.link.problem}"))
        if self._outbox is not None:
            self._outbox.news.set()

    # What requests tell

    def _ended(self, request: EngineRequest) -> None:
        if self._running.get(request.request_id) is request:
            del self._running[request.request_id]
        if request.next_index and self.link.current is not None:
            self.link.abort(call.request.request_id for call in request.calls)

    def _first_token(self, request: EngineRequest) -> None:
        self._num_cached += request.num_cached_tokens
        self._num_prefilled += request.num_prompt_tokens - request.num_cached_tokens
        self._speed.first_token(request, self._decoding)

    def _step(self, request: EngineRequest, choice: int, num_tokens: int) -> None:
        self._num_steps += 1
        self._num_generated += num_tokens
        self._speed.step(request, choice, self._decoding)

    def _decoding(self) -> Work:
        """Return what the requests that have a first token compute in one step."""
        started = [request for request in self._running.values() if request.first_ns]
        return Work(
            num_decoding=sum(len(request.next_index) for request in started),
            decode_context=sum(request.num_context_tokens for request in started),
        )

    # Load

    def _num_blocks(self, process: EngineProcess) -> int:
        """Return the blocks of the engine's pool; if it does not say, as many as its sequences could need."""
        facts = process.facts
        total = process.load.num_total_tokens or facts.max_num_seqs * facts.max_context
        return max(1, total // facts.block_size)

    def _report(self, process: EngineProcess) -> worker_pb2.LoadReport:
        """Return the load: the engine's figures, or what runs here if that is more, as other clients may use the engine too."""
        load, total, work = process.load, self._num_blocks(process), self._decoding()
        waiting = [request for request in self._running.values() if not request.first_ns]
        num_own = work.num_decoding + sum(len(request.next_index) for request in waiting)
        num_waiting_tokens = sum(request.num_prompt_tokens for request in waiting)
        used_tokens = max(load.num_used_tokens, work.decode_context + num_waiting_tokens)
        return worker_pb2.LoadReport(
            worker_id=f"engine-{self.target}",
            epoch=process.epoch,
            roles=ROLES,
            num_running=max(load.num_running, num_own - load.num_waiting),
            num_waiting=load.num_waiting,
            num_total_blocks=total,
            num_free_blocks=max(0, total - -(-used_tokens // process.facts.block_size)),
            num_waiting_tokens=num_waiting_tokens,
            num_prefilling=len(waiting),
            num_decoding=work.num_decoding,
            decode_context=work.decode_context,
            max_num_seqs=process.facts.max_num_seqs,
            num_steps=self._num_steps,
            num_generated_tokens=self._num_generated,
            num_prefilled_tokens=self._num_prefilled,
            num_prefix_hit_tokens=self._num_cached,
            latency_model=self._speed.message(),
        )


def _granted(submit: decode_pb2.SubmitRequest, process: EngineProcess) -> common_pb2.Reservation:
    return common_pb2.Reservation(
        reservation_id=submit.request_id,
        epoch=process.epoch,
        attempt=submit.attempt,
        lease_ms=LEASE_MS,
        layout=process.facts.layout,
    )


async def _drop(requests: AsyncIterator[Any]) -> None:
    """Read heartbeats, so that they do not heap up."""
    async for _ in requests:
        pass


class EngineBridges:
    """Hold one bridge for each engine. The fleet watches them as workers, at `addresses`, through their channels."""

    def __init__(self, config: RouterConfig, channels: Channels) -> None:
        """Create the bridges; `channels` then lead to them at the engines' addresses."""
        self._bridges = [
            EngineBridge(
                address,
                config.model_folders(),
                period_s=config.report_period_ms / 1000,
                timeout_s=config.engine_timeout_s,
                shares_cache=config.engine_tenants == "share",
            )
            for address in config.engine_addresses()
        ]
        for bridge in self._bridges:
            channels.put(bridge.target, bridge.channel)

    @property
    def addresses(self) -> tuple[str, ...]:
        """Return the addresses of the engines, host:port."""
        return tuple(bridge.target for bridge in self._bridges)

    async def start(self) -> None:
        """Begin to follow the engines. One that is not there yet is waited for; raises ConfigError for what is no engine, or has
        another model."""
        try:
            await asyncio.gather(*(bridge.link.probe() for bridge in self._bridges))
        except NotAnEngine as error:
            raise ConfigError(FLAG, str(error)) from error
        for bridge in self._bridges:
            bridge.link.start()

    async def stop(self) -> None:
        """Leave the engines; requests that still run there are aborted."""
        await asyncio.gather(*(bridge.link.stop() for bridge in self._bridges))
