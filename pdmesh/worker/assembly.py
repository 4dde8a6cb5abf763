"""The assembly of a worker: engine, KV transfer, both services, control. It stops in the reverse order of its start."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import math
import time
from collections.abc import Callable, Coroutine

from decode_service.request import DecodeSpans
from decode_service.service import DecodeService, Dependencies
from kvtransfer.receiver.delegates import Delegates
from kvtransfer.receiver.receiver import Receiver
from kvtransfer.sender.sender import Sender
from kvtransfer.tiers.tiers import KVTiers
from kvtransfer.transports.grpc import SERVICE as PUSH_SERVICE
from kvtransfer.transports.grpc import add_push_service
from pdmesh.engine.errors import EngineStopped
from pdmesh.engine.outputs import StepResult
from pdmesh.runtime.addresses import join_address
from pdmesh.runtime.config import ConfigError
from pdmesh.runtime.errors import ResourceExhausted
from pdmesh.runtime.process import new_epoch
from pdmesh.runtime.rpc.channel import PATIENT, Channels
from pdmesh.runtime.rpc.mesh_secret import MeshSecret, is_loopback, open_secret
from pdmesh.runtime.rpc.server import GrpcServer
from pdmesh.runtime.rpc.tls import Tls, open_tls
from pdmesh.runtime.telemetry.config import resource_of
from pdmesh.runtime.telemetry.metrics import Readings
from pdmesh.runtime.telemetry.tracing import open_tracing
from pdmesh.v1 import decode_pb2_grpc, prefill_pb2_grpc, worker_pb2, worker_pb2_grpc
from pdmesh.worker.adapters import WorkerAdapters
from pdmesh.worker.config import WorkerConfig
from pdmesh.worker.control import ControlServicer, RoleChanges
from pdmesh.worker.description import Description, describe
from pdmesh.worker.engines.base import EngineEvents, WorkerEngine
from pdmesh.worker.kv_events.prefix_publisher import PrefixPublisher, list_blocks, most_names
from pdmesh.worker.kv_events.service import KVEvents
from pdmesh.worker.kv_events.stream import watch_blocks
from pdmesh.worker.kv_sources import WorkerKVSources, kv_tiers_of, open_kv_tiers
from pdmesh.worker.load import ExpertWindow, LoadReporter, StepWatch
from pdmesh.worker.metrics import Seen, WorkerMetrics, read
from pdmesh.worker.roles import Role, RoleGate, roles_of
from pdmesh.worker.serving import WorkerServing
from pdmesh.worker.step_dispatcher import StepDispatcher, StepSpans
from pdmesh.worker.token_request import ModelGrammars, ServedModel
from pdmesh.worker.weight_updates.update import WorkerWeights, made_of_identity
from prefill_service.handoff import HandoffTools
from prefill_service.kv_pull import KVPuller, PullTools
from prefill_service.kv_send import BlockSender
from prefill_service.kv_warm import KVWarmer, WarmTools
from prefill_service.service import PrefillServicer, PrefillValidator

STREAM_END_GRACE_S = 2.0  # time for frames and responses that are on their way at the end

logger = logging.getLogger(__name__)


class Worker:
    """Own every part between the engine and the network, and the engine as well."""

    def __init__(
        self,
        config: WorkerConfig,
        engine: WorkerEngine,
        *,
        worker_id: str,
        on_failure: Callable[[BaseException], None],
    ) -> None:
        """Put the worker together. `on_failure` is called with errors that the worker cannot survive: a failed engine, a bug in a
        background task.

        Raises ConfigError for invalid certificates.
        """
        self.epoch = new_epoch()
        self.gate = RoleGate(roles_of(config.roles))
        self.changes = RoleChanges()
        self.dispatcher = StepDispatcher()
        self.engine = engine
        self.description: Description | None = None
        self._config = config
        self._worker_id = worker_id
        resource = resource_of(worker_id, config.mesh, config.roles, self.epoch)
        self.tracing = open_tracing(config.telemetry, "pdmesh-worker", resource)
        self._spans = DecodeSpans(self.tracing, lambda: self.dispatcher.num_steps)
        self._step_spans = StepSpans(self._spans)
        self._on_failure = on_failure
        self.metrics = WorkerMetrics.open(config, worker_id, self.epoch, engine.facts.cost, self._read_metrics)
        self._prefix_cache = engine.prefix_cache(most_names(config))
        self._publisher = PrefixPublisher(self._prefix_cache, self.epoch, worker_id) if config.redis else None
        self._grammars = ModelGrammars(engine.facts)
        self.adapters = WorkerAdapters(engine.adapters, config.served_name, self._adapters_changed)
        self._served_model = served_model = ServedModel.of(engine.facts, config.served_name, self._grammars, self.adapters.find)
        self.kv_events = KVEvents(config.kv_event_settings, engine, served_model.plain_root)
        self.watch = StepWatch(engine.pacer)
        self._experts = ExpertWindow()
        self.tiers = kv_tiers_of(config, engine, served_model.identity, served_model.layout, self._prefill_s)
        self.load = self._load_reporter(self.tiers)
        self.load.adapters = self.adapters.infos()
        tls, self.secret = open_tls(config.tls), open_secret(config.mesh_secret)
        _warn_if_open(config, tls, self.secret)
        self._sender = Sender(engine.memory, served_model.identity, served_model.layout, self.epoch, tls=tls, secret=self.secret)
        self._channels = Channels(tls=tls, secret=self.secret, keepalive=PATIENT)
        self.puller = self._kv_puller(served_model)
        self._sources = WorkerKVSources(engine.sharing, self.tiers, self.puller) if self.tiers or self.puller else None
        self._warmer = KVWarmer(self._warm_tools(served_model))
        self.block_sender = self._block_sender(served_model)
        self.prefill = self._prefill_servicer(served_model)
        self.serving = self._serving()
        depending = made_of_identity(config)
        self._weights = WorkerWeights(engine, served_model, self._weights_changed, depending, self.serving)
        self.decode = DecodeService(config.decode_settings, self._dependencies(served_model))
        self._receiver = self._kv_receiver(served_model, tls)
        self._server = GrpcServer(config.host, config.port, tls=tls, secret=self.secret)
        self._tasks: list[asyncio.Task[None]] = []
        self._role_change = asyncio.Lock()

    async def start(self) -> Description:
        """Serve, and return the description of the worker. Raises ConfigError when an address is taken."""
        self._grammars.prepare_if_large()
        events = EngineEvents(self._on_step, self.dispatcher.on_ready, self._on_failure)
        self.watch.start_from(await self.engine.open(events, self._config.cpus))
        if self.tiers is not None:
            await open_kv_tiers(self.tiers, self._config, self._served_model.identity, self._served_model.layout)
        try:
            await self._receiver.start()
        except OSError as error:
            raise ConfigError("--transfer-port", f"cannot listen for KV on {self._transfer_address}: {error.strerror}") from error
        self._register()
        await self._server.start()
        self._receiver.grpc_address = self._address
        self.description = self._describe()
        self.kv_events.open()
        for work in (self.decode.keeper.run(), self.load.run(), *self.kv_events.work()):
            self._tasks.append(self._background(work))
        if self._publisher is not None:
            from pdmesh.runtime.registry.block_stream import BlockStream  # redis is imported only for a registry

            self._tasks.append(self._background(self._publisher.run(BlockStream(self._config.redis, self._config.mesh))))
        if self.tiers is not None:
            self._tasks.append(self._background(self.tiers.run()))
        await self.metrics.start()
        await self._server.set_serving(True)
        return self.description

    def _register(self) -> None:
        control = ControlServicer(
            info=self.info,
            report=self.load.report,
            changes=self.changes,
            set_roles=self.set_roles,
            list_blocks=lambda: list_blocks(self._prefix_cache, self.epoch, lambda: self.tiers.held if self.tiers else ()),
            watch_blocks=lambda: watch_blocks(self.kv_events.feed, self.epoch),
            keep_traces=self.tracing.keep,
            release_retained=self.engine.release_retained,
            send_blocks=self._send_blocks,
            warm_prefix=self._warmer.warm,
            adapters=self.adapters,
            update_weights=self._weights.update,
            send_weights=self._weights.receive,
            read_weights=self._weights.read,
            set_serving=self.serving.set,
        )
        add_decode = decode_pb2_grpc.add_DecodeServiceServicer_to_server
        add_prefill = prefill_pb2_grpc.add_PrefillServiceServicer_to_server
        self._server.register(add_decode, self.decode.servicer, "pdmesh.v1.DecodeService")
        self._server.register(add_prefill, self.prefill, "pdmesh.v1.PrefillService")
        self._server.register(worker_pb2_grpc.add_WorkerControlServicer_to_server, control, "pdmesh.v1.WorkerControl")
        if self._receiver.takes_calls:
            self._server.register(add_push_service, self._receiver, PUSH_SERVICE)

    def info(self) -> worker_pb2.WorkerInfo:
        """Return the message that the worker registers, with the present roles. Call it only after `start`."""
        assert self.description is not None, "the worker has not been started"
        return self.description.info()

    async def _send_blocks(self, request: worker_pb2.SendBlocksRequest) -> worker_pb2.SendBlocksResponse:
        """Serve SendBlocks. Raises ResourceExhausted while nothing is computed here: a sleeper has no blocks."""
        if not self.gate.is_running:
            raise ResourceExhausted("this worker is paused or asleep; compute the prompt", retry_delay_s=1.0)
        return await self.block_sender.send(request)

    async def set_roles(self, roles: frozenset[Role], drain_timeout_s: float) -> None:
        """Set the roles. New roles count at once; a removed role finishes its requests, or abandons them after the timeout."""
        async with self._role_change:
            removed = set(self.gate.roles) - roles
            self.gate.set(roles)
            self.changes.notify()
            await self._finish_work(removed, drain_timeout_s, "the role was taken away")

    async def drain(self, grace_s: float) -> None:
        """Take no new requests. Running requests may finish for `grace_s`, pushes until they are acknowledged; the others are
        abandoned."""
        self.gate.draining = True
        self.changes.notify()
        await self._server.set_serving(False)
        await self._finish_work({worker_pb2.ROLE_PREFILL, worker_pb2.ROLE_DECODE}, grace_s, "the worker is stopping")

    async def stop(self) -> None:
        """End streams, sockets and threads, and free the memory; idempotent. Requests that still run are lost."""
        self.gate.draining = True
        self.changes.close()
        self.decode.close_streams()
        self.kv_events.close()
        await self._server.drain(STREAM_END_GRACE_S)
        if self.tiers is not None:
            await self.tiers.flush()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        with contextlib.suppress(EngineStopped):  # a failed engine no longer tracks its blocks anyway
            await self.prefill.abandon()
            await self.decode.abandon("the worker is stopping")
        await self._receiver.stop()
        await self._sender.close()
        await self._channels.close()
        if self.tiers is not None:
            self.tiers.close()
        await self.engine.stop()
        self.engine.close()
        await self._weights.close()
        await self.metrics.stop()
        self._step_spans.flush()
        await asyncio.to_thread(self.tracing.close)

    async def _finish_work(self, roles: set[Role], timeout_s: float, reason: str) -> None:
        if not self.serving.is_computing:
            timeout_s = 0.0  # nothing of it would end
        try:
            async with asyncio.timeout(timeout_s):
                await self._wait_idle(roles)
        except TimeoutError:
            logger.warning("%s, and %.0f s were not enough for its work: giving it up", reason, timeout_s)
            if worker_pb2.ROLE_PREFILL in roles:
                await self.prefill.abandon()
            if worker_pb2.ROLE_DECODE in roles:
                await self.decode.abandon(reason, is_fault=self.serving.is_computing)

    async def _finished_within(self, timeout_s: float) -> bool:
        """Wait for the end of all requests; return whether they have ended."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._wait_idle({worker_pb2.ROLE_PREFILL, worker_pb2.ROLE_DECODE})
                return True
        return False

    async def _give_up(self) -> None:
        """Give all requests back to their routers, through no fault of this worker."""
        await self.decode.abandon("the worker goes to sleep", is_fault=False)
        await self.prefill.abandon()

    async def _flush_tiers(self) -> None:
        if self.tiers is not None:
            await self.tiers.flush()

    async def _wait_idle(self, roles: set[Role]) -> None:
        """Wait for decode first, because routers move its requests elsewhere, which is prefill work here."""
        if worker_pb2.ROLE_DECODE in roles:
            await self.decode.wait_idle()
        if worker_pb2.ROLE_PREFILL in roles:
            await self.prefill.wait_idle()

    def _on_step(self, result: StepResult) -> None:
        try:
            self.watch.on_step(result)
            self.metrics.on_step(result)
            self.load.on_step(result)  # before requests get their tokens and a router reads the load
            self._step_spans.on_step(result)
            self.dispatcher.on_step(result)
        except Exception as error:  # noqa: BLE001  lost results cannot be produced again
            self._on_failure(error)

    def _weights_changed(self) -> None:
        self.description = self._describe()
        self.load.weights_hash = self._served_model.identity.weights_hash
        self.changes.notify()

    def _adapters_changed(self) -> None:
        self.load.adapters = self.adapters.infos()
        self.changes.notify()

    def _read_metrics(self, readings: Readings) -> None:
        expired = self.decode.keeper.num_expired
        pulls = None if self.puller is None else self.puller.counts
        corrupt = {transport: self._receiver.num_corrupt[transport] for transport in self._config.transports}
        counts = self.engine.expert_counts()
        experts = None if counts is None else self._experts.take(counts, time.monotonic())
        report, limits, cores = self.load.report(), self.engine.limits(), self.engine.core_seconds()
        seen = Seen(self.load.stats, report, limits, corrupt, expired, experts, pulls, self.tiers, cores)
        read(readings, seen)

    def _background(self, work: Coroutine[object, object, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        task.add_done_callback(functools.partial(_report_failure, self._on_failure))
        return task

    def _load_reporter(self, tiers: KVTiers | None) -> LoadReporter:
        return LoadReporter(
            self.engine,
            self.gate,
            self.engine.first_stats(),
            self.watch,
            worker_id=self._worker_id,
            epoch=self.epoch,
            max_num_seqs=self.engine.facts.max_num_seqs,
            num_handoff_failures=lambda: self.prefill.num_handoff_failures + self.decode.reservations.num_handoff_failures,
            restore_token_s=None if tiers is None else lambda: tiers.token_s,
        )

    def _prefill_servicer(self, served_model: ServedModel) -> PrefillServicer:
        tools = HandoffTools(
            self.engine,
            self.dispatcher,
            self._sender,
            served_model.layout.block_size,
            lambda: self.dispatcher.num_steps,
            self.engine.notify_every,
            self.metrics.pushed,
            self._longest_step_s,
            self._sources,
        )
        return PrefillServicer(
            PrefillValidator(served_model.identity, served_model.layout, served_model.translate),
            tools,
            check_new_work=self.gate.checker(worker_pb2.ROLE_PREFILL),
            owns_requests=lambda: bool(self.decode.reservations.active) and not self.gate.gives_up,
            tracing=self.tracing,
            steps=self._spans.steps,
        )

    def _serving(self) -> WorkerServing:
        return WorkerServing(
            self.engine,
            self.gate,
            changed=self.changes.notify,
            finish=self._finished_within,
            give_up=self._give_up,
            flush=self._flush_tiers,
            num_requests=lambda: len(self.decode.reservations.active) + self.prefill.num_held,
        )

    def _block_sender(self, served_model: ServedModel) -> BlockSender:
        """Return what sends blocks to other workers, those of its tiers included where these are not for itself alone."""
        return BlockSender(
            self.engine.sharing,
            self._sender,
            served_model.identity,
            served_model.layout,
            epoch=self.epoch,
            max_tokens=self.engine.facts.max_context,
            compute_s=self._prefill_s,
            restore=None if self.tiers is None or self._config.tiers.private else self.tiers.restore,
            adapter_of=self.adapters.find,
        )

    def _kv_puller(self, served_model: ServedModel) -> KVPuller | None:
        """Return what fetches KV for prompts; None where it is switched off, or the engine cannot take it in."""
        engine, memory = self.engine, self.engine.memory
        if engine.sharing is None or self._config.kv_pull == "off":
            return None
        layout = served_model.layout
        return KVPuller(
            PullTools(
                engine,
                engine.sharing,
                served_model.identity,
                layout,
                self.epoch,
                endpoints=lambda: self._receiver.endpoints(),
                quiesce=lambda reservation_id: self._receiver.quiesce(reservation_id),
                channel=self._channels.get,
                forget=self._channels.forget,
                compute_s=self._prefill_s,
                bytes_per_token=2 * memory.num_layers * memory.bytes_per_layer_block / layout.block_size,
                lease_s=self._config.lease_s,
                is_forced=self._config.kv_pull == "always",
            )
        )

    def _warm_tools(self, served_model: ServedModel) -> WarmTools | None:
        """Return what fetches prefixes before requests ask for them; None where nothing is fetched."""
        engine, memory = self.engine, self.engine.memory
        if self.puller is None or engine.sharing is None:
            return None
        return WarmTools(
            engine,
            engine.sharing,
            self.puller,
            served_model.translate,
            restore=None if self.tiers is None else self.tiers.restore,
            is_draining=lambda: self.gate.draining or not self.gate.is_running,
            epoch=self.epoch,
            block_size=served_model.layout.block_size,
            block_bytes=2 * memory.num_layers * memory.bytes_per_layer_block,
            max_blocks=int(self._config.warm_share * engine.facts.num_blocks),
            max_tokens=engine.facts.max_context,
        )

    def _longest_step_s(self) -> float:
        """Return how long a step may be expected to take: without end while none is to begin."""
        return self.watch.longest_step_s(self.engine.facts.max_num_batched_tokens) if self.serving.is_computing else math.inf

    def _prefill_s(self, first: int, last: int) -> float | None:
        """Return how long tokens `first` to `last` of a prompt should take to compute."""
        return self.watch.prefill_s(first, last, self.engine.facts.max_num_batched_tokens)

    def _dependencies(self, served_model: ServedModel) -> Dependencies:
        return Dependencies(
            epoch=self.epoch,
            identity=served_model.identity,
            layout=served_model.layout,
            translate=served_model.translate,
            engine=self.engine,
            sinks=self.dispatcher,
            quiesce=lambda reservation_id: self._receiver.quiesce(reservation_id),
            endpoints=lambda: self._receiver.endpoints(),
            check_new_work=self.gate.checker(worker_pb2.ROLE_DECODE),
            num_steps=lambda: self.dispatcher.num_steps,
            load_report=self.load.report,
            spans=self._spans,
            sources=self._sources,
            earlier_weights=self._weights,
        )

    def _kv_receiver(self, served_model: ServedModel, tls: Tls | None) -> Receiver:
        """Return the receiver over the configured transports that can write to the pool; cuda_ipc and nixl require that a staged
        pool is shared."""
        config = self._config
        return Receiver(
            self.engine.memory,
            Delegates(self.decode.delegate, self.puller),
            served_model.identity,
            served_model.layout,
            host=config.host,
            port=config.transfer_port,
            transports=config.transports,
            advertise=config.advertise or None,
            idle_timeout_s=config.lease_s,
            tls=tls,
            secret=self.secret,
            fp8_scales=self.engine.fp8_scales,
        )

    @property
    def _transfer_address(self) -> str:
        return join_address(self._config.host, self._config.transfer_port)

    @property
    def _address(self) -> str:
        """Return the host:port at which others reach the gRPC server. Call it only once that has started."""
        return join_address(self._config.advertise or self._config.host, self._server.port)

    def _describe(self) -> Description:
        return describe(
            self.engine.facts,
            self.gate,
            self.adapters,
            worker_id=self._worker_id,
            epoch=self.epoch,
            address=self._address,
            model=self._config.served_name,
            transports=self._receiver.reach(),
            fetch_token_s=0.0 if self.puller is None else self.puller.token_s,
            restore_token_s=0.0 if self.tiers is None else self.tiers.token_s,
            private_tiers=self.tiers is not None and self._config.tiers.private,
            warm_blocks=self._warmer.max_blocks,
            revision=self._config.revision,
        )


def _warn_if_open(config: WorkerConfig, tls: Tls | None, secret: MeshSecret | None) -> None:
    """Say that nothing tells the mesh from others, where others reach the ports. It is no error: a network policy may do it."""
    if tls is None and secret is None and not is_loopback(config.host):
        logger.warning(
            "listening on %s without --mesh-secret-file and without TLS: everybody who reaches the ports can submit and cancel "
            "requests, read tokens, read and write KV and change roles; see docs/security.md",
            config.host,
        )


def _report_failure(on_failure: Callable[[BaseException], None], task: asyncio.Task[None]) -> None:
    # EngineStopped is not reported here, because the engine has reported its failure itself.
    if not task.cancelled() and (error := task.exception()) is not None and not isinstance(error, EngineStopped):
        on_failure(error)
