"""The description of this worker: identity and layout, which peers compare, and the message that it registers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvtransfer.layout import Reach, Scope
from kvtransfer.manifest import PROTOCOL_VERSION
from pdmesh.runtime.process import host_id
from pdmesh.v1 import common_pb2, worker_pb2
from pdmesh.worker.adapters import WorkerAdapters
from pdmesh.worker.engines.base import EngineFacts
from pdmesh.worker.roles import RoleGate


def identity_of(facts: EngineFacts, model: str) -> common_pb2.Identity:
    """Return the identity, which must be equal on both ends of a hand-off."""
    return common_pb2.Identity(
        model=model,
        weights_hash=facts.weights_hash,
        num_layers=facts.num_layers,
        num_kv_heads=facts.num_kv_heads,
        head_dim=facts.head_dim,
        numeric_mode=facts.numeric_mode,
        protocol_version=PROTOCOL_VERSION,
    )


def layout_of(facts: EngineFacts) -> common_pb2.KVLayout:
    """Return the KV layout, which must be convertible between both ends of a hand-off."""
    return common_pb2.KVLayout(
        block_size=facts.block_size,
        kv_dtype=facts.kv_dtype,
        # Peers see a pool with all heads, whatever the number of ranks: ranks share memory, or stage their heads.
        tensor_parallel_size=1,
        arrangement=facts.arrangement,
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
    facts: EngineFacts
    gate: RoleGate
    adapters: WorkerAdapters
    fetch_token_s: float
    restore_token_s: float
    private_tiers: bool
    warm_blocks: int
    revision: str

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
            max_context=self.facts.max_context,
            max_num_seqs=self.facts.max_num_seqs,
            max_num_batched_tokens=self.facts.max_num_batched_tokens,
            num_blocks=self.facts.num_blocks,
            eos_token_ids=sorted(self.facts.eos_token_ids),
            host_id=host_id(),
            adapters=self.adapters.infos(),
            max_adapters=self.adapters.max_adapters,
            engine=self.facts.name,
            lacks=sorted(lack.value for lack in self.facts.lacks),
            fetch_token_s=self.fetch_token_s,
            restore_token_s=self.restore_token_s,
            private_tiers=self.private_tiers,
            warm_blocks=self.warm_blocks,
            revision=self.revision,
        )


def describe(
    facts: EngineFacts,
    gate: RoleGate,
    adapters: WorkerAdapters,
    *,
    worker_id: str,
    epoch: int,
    address: str,
    model: str,
    transports: Mapping[str, Reach],
    fetch_token_s: float = 0.0,
    restore_token_s: float = 0.0,
    private_tiers: bool = False,
    warm_blocks: int = 0,
    revision: str = "",
) -> Description:
    """Return the description of a worker around an engine with these facts."""
    return Description(
        worker_id=worker_id,
        epoch=epoch,
        address=address,
        identity=identity_of(facts, model),
        layout=layout_of(facts),
        transports=transports,
        facts=facts,
        gate=gate,
        adapters=adapters,
        fetch_token_s=fetch_token_s,
        restore_token_s=restore_token_s,
        private_tiers=private_tiers,
        warm_blocks=warm_blocks,
        revision=revision,
    )
