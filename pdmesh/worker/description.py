"""The description of this worker: identity and layout, which peers compare, and the message that it registers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvtransfer.layout import Reach, Scope
from kvtransfer.manifest import PROTOCOL_VERSION
from pdmesh.engine.engine import Engine
from pdmesh.engine.memory import effective_max_context
from pdmesh.runtime.process import host_id
from pdmesh.v1 import common_pb2, worker_pb2
from pdmesh.worker.adapters import WorkerAdapters
from pdmesh.worker.roles import RoleGate


def identity_of(engine: Engine, model: str) -> common_pb2.Identity:
    """Return the identity, which must be equal on both ends of a hand-off."""
    shape = engine.kv.shape
    return common_pb2.Identity(
        model=model,
        weights_hash=engine.weights_hash,
        num_layers=shape.num_layers,
        num_kv_heads=engine.model_config.pool_heads,
        head_dim=engine.model_config.pool_dim,
        numeric_mode=engine.numeric_mode,
        protocol_version=PROTOCOL_VERSION,
    )


def layout_of(engine: Engine) -> common_pb2.KVLayout:
    """Return the KV layout, which must be convertible between both ends of a hand-off."""
    shape = engine.kv.shape
    dtype = str(shape.dtype).removeprefix("torch.")
    return common_pb2.KVLayout(
        block_size=shape.block_size,
        kv_dtype=dtype,
        # Peers see a pool with all heads, whatever the number of ranks: ranks share memory, or stage their heads.
        tensor_parallel_size=1,
        arrangement=engine.kv_arrangement,
    )


_SCOPES = {
    Scope.PROCESS: worker_pb2.REACH_SCOPE_PROCESS,
    Scope.HOST: worker_pb2.REACH_SCOPE_HOST,
    Scope.EVERYWHERE: worker_pb2.REACH_SCOPE_EVERYWHERE,
}


def _reach(transport: str, reach: Reach) -> worker_pb2.TransportReach:
    return worker_pb2.TransportReach(transport=transport, scope=_SCOPES[reach.scope], same_layout=reach.same_layout)


@dataclass(frozen=True)
class Description:
    """Hold the facts about a worker that do not change while it runs, and its roles and adapters, which may change."""

    worker_id: str
    epoch: int
    address: str
    identity: common_pb2.Identity
    layout: common_pb2.KVLayout
    transports: Mapping[str, Reach]
    max_context: int
    max_num_seqs: int
    max_num_batched_tokens: int
    num_blocks: int
    eos_token_ids: tuple[int, ...]
    gate: RoleGate
    adapters: WorkerAdapters

    def info(self) -> worker_pb2.WorkerInfo:
        """Return the message to register, with the present roles and adapters."""
        return worker_pb2.WorkerInfo(
            worker_id=self.worker_id,
            epoch=self.epoch,
            address=self.address,
            roles=self.gate.roles,
            home_roles=self.gate.home_roles,
            identity=self.identity,
            layout=self.layout,
            transports=list(self.transports),
            transport_reach=[_reach(name, reach) for name, reach in self.transports.items()],
            max_context=self.max_context,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            num_blocks=self.num_blocks,
            eos_token_ids=self.eos_token_ids,
            host_id=host_id(),
            adapters=self.adapters.infos(),
            max_adapters=self.adapters.max_adapters,
        )


def describe(
    engine: Engine,
    gate: RoleGate,
    adapters: WorkerAdapters,
    *,
    worker_id: str,
    epoch: int,
    address: str,
    model: str,
    transports: Mapping[str, Reach],
) -> Description:
    """Return the description of a worker around `engine`."""
    return Description(
        worker_id=worker_id,
        epoch=epoch,
        address=address,
        identity=identity_of(engine, model),
        layout=layout_of(engine),
        transports=transports,
        # The engine refuses a request whose prompt and max_tokens would not fit into an empty pool.
        max_context=min(
            effective_max_context(engine.config, engine.model_config), engine.kv.shape.num_blocks * engine.kv.shape.block_size
        ),
        max_num_seqs=engine.config.max_num_seqs,
        max_num_batched_tokens=engine.config.max_num_batched_tokens,
        num_blocks=engine.kv.shape.num_blocks,
        eos_token_ids=tuple(sorted(engine.eos_token_ids)),
        gate=gate,
        adapters=adapters,
    )
