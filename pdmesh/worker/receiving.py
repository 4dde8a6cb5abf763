"""Where KV from other workers arrives in this one."""

from __future__ import annotations

from decode_service.service import DecodeService
from kvtransfer.receiver.receiver import Receiver
from kvtransfer.staging import StagedMemory
from pdmesh.engine.engine import Engine
from pdmesh.runtime.rpc.tls import Tls
from pdmesh.worker.config import WorkerConfig
from pdmesh.worker.terms import Terms


def receiver_for(
    config: WorkerConfig,
    engine: Engine,
    staged: StagedMemory | None,
    decode: DecodeService,
    terms: Terms,
    tls: Tls | None,
) -> Receiver:
    """Over those of the configured transports that can write to the pool; cuda_ipc and nixl ask whether a staged one is shown."""
    return Receiver(
        staged or engine.kv,
        decode.delegate,
        terms.identity,
        terms.layout,
        host=config.host,
        port=config.transfer_port,
        transports=config.transports,
        advertise=config.advertise or None,
        idle_timeout_s=config.lease_s,
        tls=tls,
        fp8_scales=engine.kv_scales,
    )
