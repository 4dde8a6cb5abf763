"""The KV connector that vLLM loads (`kv_connector_module_path`): EngineCore waits for KV that pdmesh's receiver writes, and keeps
the blocks that pdmesh's sender reads. It moves nothing itself; both ends are those of every pdmesh worker (kvtransfer/).

Life of a request that is filled from elsewhere (names from vLLM 0.32, v1/core/sched/scheduler.py):

    get_num_new_matched_tokens   all tokens that the prefix cache lacks come from outside, later
    update_state_after_alloc     its blocks are granted: pdmesh's reservation. vLLM holds it in WAITING_FOR_REMOTE_KVS
    build_connector_meta         what every rank reports once at the step's end: received, complete and checked; or after an
                                 abort, without which vLLM would keep the blocks for ever. An attempt that failed is aborted, and
                                 computed here under another name
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)

from pdmesh_vllm.link import Link, WorkerLink, link_of, worker_link_of

if TYPE_CHECKING:
    from torch import Tensor
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request


@dataclass
class StepMetadata(KVConnectorMetadata):
    """Tell the worker half of a step. `is_awaited`: its layers are announced. `received`, `sent`: what ranks report at its end,
    each request once."""

    step: int
    is_awaited: bool
    received: set[str]
    sent: set[str]


class PdmeshConnector(KVConnectorBase_V1, SupportsHMA):
    """Be both halves of the connector; vLLM makes a scheduler half in the engine's process, and a worker half for each rank."""

    _link: Link
    _worker_link: WorkerLink

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        """Raises ValueError for a model with several KV groups, whose blocks one transfer cannot name."""
        super().__init__(vllm_config, role, kv_cache_config)
        extra_config = self._kv_transfer_config.kv_connector_extra_config
        if role is KVConnectorRole.SCHEDULER:
            self._link = link_of(extra_config)
        else:
            self._worker_link = worker_link_of(extra_config)
        groups = kv_cache_config.kv_cache_groups
        if len(groups) != 1:
            raise ValueError(f"model: vLLM gives it {len(groups)} KV groups (windows, states), and a transfer moves one")

    # The scheduler half.

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        if request.request_id not in self._link.waits_for_kv:
            return 0, False
        self._link.on_asked(request.request_id)
        return request.num_tokens - num_computed_tokens, True

    def get_loaded_kv_cache_group_ids(self, request: Request) -> tuple[int, ...]:
        return (0,)

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        if num_external_tokens:
            [block_ids] = blocks.get_block_ids()
            self._link.on_granted(request.request_id, block_ids, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        outcomes = self._link.take_outcomes()
        step = self._link.begin_step(scheduler_output)
        return StepMetadata(step, self._link.is_awaited(), outcomes.received, outcomes.sent)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return request.request_id in self._link.holds_blocks, None

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return request.request_id in self._link.holds_blocks, None

    def has_pending_push_work(self) -> bool:
        return bool(self._link.outcomes)

    # The worker half.

    def register_kv_caches(self, kv_caches: dict[str, Tensor]) -> None:
        self._worker_link.register(kv_caches)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Do nothing: the receiver writes while steps run."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: a request runs only once all of its layers are there."""

    def save_kv_layer(self, layer_name: str, kv_layer: Tensor, attn_metadata: AttentionMetadata, **kwargs: Any) -> None:
        step = self._step
        if step.is_awaited:
            self._worker_link.announce(layer_name, step.step)

    def wait_for_save(self) -> None:
        """Do nothing: blocks that are read stay until the sender is through."""

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        return KVConnectorTransferResults(finished_sending=self._step.sent, finished_recving=self._step.received)

    @property
    def _step(self) -> StepMetadata:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, StepMetadata)
        return metadata

    @property
    def requires_kv_delivery(self) -> bool:
        """Return False: a prefill that loses its blocks is ended by the engine, and computed elsewhere."""
        return False

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Return True: a layer is announced between two pieces of a graph."""
        return True
