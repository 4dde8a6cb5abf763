"""The process of an endpoint picker: it wires the parts together, serves, and drains."""

from __future__ import annotations

import os

import grpc

from pdmesh.runtime import config as runtime_config
from pdmesh.runtime import log, process
from pdmesh.runtime.addresses import join_address
from pdmesh.runtime.errors import Unavailable
from pdmesh.runtime.rpc.certificates import make_self_signed
from pdmesh.runtime.rpc.server import ConnectionLimits, GrpcServer
from pdmesh.runtime.rpc.tls import open_tls
from pdmesh.runtime.telemetry.config import resource_of
from pdmesh.runtime.telemetry.open_metrics import open_metrics
from pdmesh.third_party.envoy import ext_proc_pb2_grpc as pb_grpc
from router.endpoint_picker.config import PickerConfig
from router.endpoint_picker.endpoints import Endpoints
from router.endpoint_picker.picker import Picker
from router.endpoint_picker.service import SERVICE, ExternalProcessor, PickerReader
from router.endpoint_picker.sources import MetricsReader, PoolApi, PoolFollower
from router.main import spare_collector

NAME = "pdmesh-endpoint-picker"
DAYS = 3650


class SelfSigned:
    """Satisfy `ServerTls` with a certificate made at start: gateways encrypt the way to a picker, and most verify nothing."""

    name = NAME

    def __init__(self) -> None:
        self.certificate, self._key = make_self_signed(NAME, days=DAYS)

    def server_credentials(self, *, require_client: bool) -> grpc.ServerCredentials:
        """Return the credentials of a listening port; it has no CA by which clients could be told apart."""
        assert not require_client
        return grpc.ssl_server_credentials([(self._key, self.certificate)])


PROBES = ("liveness", "readiness")
"""Names that the endpoint picker protocol gives to health checks, beside the service's own."""


class PickerServer:
    """Run an endpoint picker in this process, from `start` to `stop`."""

    def __init__(self, config: PickerConfig) -> None:
        """Load the parts. Raises ConfigError."""
        self.config = config
        self.endpoints = Endpoints(
            max_num_seqs=config.max_num_seqs,
            max_failures=config.max_failures,
            index_blocks=config.prefix_index_blocks,
            tokens_per_block=config.prefix_block_bytes // config.bytes_per_token,
        )
        self.picker = Picker(config, self.endpoints)
        resource = resource_of("endpoint-picker", config.pool, ("endpoint-picker",), 0)
        self.metrics = open_metrics(config.telemetry, "pdmesh-endpoint-picker", resource, os.environ, host=config.host)
        self.metrics.read_by(PickerReader(self.picker).read)
        self.reader = MetricsReader(
            self.endpoints,
            path=config.metrics_path,
            period_s=config.metrics_period_s,
            timeout_s=config.metrics_timeout_s,
            changed=self._changed,
        )
        self.follower: PoolFollower | None = None
        if config.pool:
            namespace, _, name = config.pool.partition("/")
            self.follower = PoolFollower(PoolApi(namespace, name).endpoints, self._found, config.pool_period_s)
        # The gateway calls with no certificate of the mesh, and a stream lasts as long as its request.
        limits = ConnectionLimits(max_streams=config.max_requests, max_calls=config.max_requests)
        tls = SelfSigned() if config.secure_serving else open_tls(config.tls)
        self.server = GrpcServer(config.host, config.port, tls=tls, callers="any", limits=limits)
        servicer = ExternalProcessor(config, self.picker, self.metrics)
        self.server.register(pb_grpc.add_ExternalProcessorServicer_to_server, servicer, SERVICE)
        self.metrics_url = ""
        self._is_serving = False

    async def start(self) -> str:
        """Listen and look for endpoints; return the address. Health is NOT_SERVING until an endpoint is ready."""
        self.metrics_url = await self.metrics.start()
        port = await self.server.start()
        self.server.set_health(False, ("readiness",))
        self.server.set_health(True, ("liveness",))
        if self.follower is not None:
            self.follower.start()
        else:
            self._found(list(self.config.endpoints))
        return join_address(self.config.host, port)

    async def stop(self) -> None:
        """Refuse new requests, follow those under way for a while, then release everything."""
        self.server.set_health(False, ("", SERVICE, "readiness"))
        self.picker.flow.close(Unavailable("the endpoint picker stops", retry_delay_s=1.0))
        await self.server.drain(self.config.drain_grace_s)
        if self.follower is not None:
            await self.follower.stop()
        await self.reader.stop()
        await self.metrics.stop()

    def _found(self, addresses: list[str]) -> None:
        self.endpoints.found(addresses)
        self.reader.follow()

    def _changed(self) -> None:
        is_serving = self.endpoints.num_ready > 0
        if is_serving != self._is_serving:
            self._is_serving = is_serving
            self.server.set_health(is_serving, ("", SERVICE, "readiness"))


async def serve(config: PickerConfig, life: process.Lifecycle) -> None:
    """Run an endpoint picker until the process is to stop."""
    picker = PickerServer(config)
    address = await picker.start()
    spare_collector()
    life.ready(address, metrics_url=picker.metrics_url)
    try:
        await life.wait_for_stop()
    finally:
        await picker.stop()


def main() -> None:
    """Run `python -m router.endpoint_picker`."""
    config = runtime_config.load(PickerConfig, None, os.environ, prog="endpoint-picker")
    log.configure("endpoint-picker")
    process.end(process.run(lambda life: serve(config, life), exit_with_parent=config.exit_with_parent))
