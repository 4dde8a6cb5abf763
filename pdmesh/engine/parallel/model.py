"""The model as rank 0 has it: every step is sent to the other ranks, then computed together with them.

On a device rank 0 waits for the end of each step before its results are used. That detects a rank that is silent
(`Group.wait`), and it is why no step is launched ahead of the one before it (pdmesh/engine/runner/overlap.py).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from typing import NoReturn

import torch
from torch import Tensor

from pdmesh.engine.config import EngineConfig
from pdmesh.engine.kv_cache.events import LayerReadiness
from pdmesh.engine.kv_cache.pool import KVPool, KVShape
from pdmesh.engine.memory import torch_step_bytes
from pdmesh.engine.models.layers import Norm
from pdmesh.engine.parallel import tp_protocol
from pdmesh.engine.parallel.collectives import Group
from pdmesh.engine.parallel.copies import CopyChannel
from pdmesh.engine.parallel.events import Commands
from pdmesh.engine.parallel.share import Share
from pdmesh.engine.parallel.shared_pieces import PiecesShape
from pdmesh.engine.parallel.split import Shard
from pdmesh.engine.parallel.tp_group import TensorParallelGroup
from pdmesh.engine.parallel.tp_protocol import ExchangeFailed, Kind, RankFailed
from pdmesh.engine.runner.batch import StepBatch
from pdmesh.engine.runner.model_runner import TokenSampler
from pdmesh.engine.sampling.sampler import Sampler


class ParallelModel:
    """Own rank 0's share, whose `config` it has, and the other ranks. For one engine and its pool."""

    def __init__(self, share: Share, ranks: TensorParallelGroup, group: Group, *, shares_pool: bool) -> None:
        """`shares_pool`: every rank sees what rank 0 writes to the pool; else each rank has a pool of its own, of its heads."""
        self.config = share.model.config
        self.backend: str = getattr(share.model, "backend", "torch")
        self.ranks, self.shares_pool = ranks, shares_pool
        self.commands = Commands()
        self._share, self._group = share, group
        self._has_pool = False
        self.watch(lambda _: None)
        weakref.finalize(self, ranks.close)  # an engine that is dropped, or whose construction failed, leaves no process either

    @torch.inference_mode()
    def forward(self, batch: StepBatch, kv: Tensor, signal: LayerReadiness | None = None, hidden: Tensor | None = None) -> Tensor:
        """See DecoderModel.forward; on a device its work is done, not only launched. Raises RankFailed, after which every step
        fails."""
        is_marked = signal is not None and signal.marks is not None
        self._tell(Kind.MARKED_STEP if is_marked else Kind.STEP, tp_protocol.encode_batch(batch))
        with self._together():
            return self._share.forward(batch, kv, signal, hidden)

    def prepare(self, kv: Tensor) -> None:
        """See LoadedModel.prepare: on every rank. Sampling comes last, so that no rank waits in an exchange while rank 0 compiles
        what it alone launches. Raises ValueError when a rank fails."""
        try:
            self._tell(Kind.PREPARE)
            with self._together():
                self._share.prepare_steps(kv)
            self._share.prepare_draws()
        except RankFailed as error:
            raise ValueError(str(error)) from error

    def sampler(self) -> TokenSampler:
        """Return a sampler that computes where rank 0's logits are, if its model has one."""
        own = getattr(self._share.model, "sampler", None)
        return own() if own is not None else Sampler()

    def step_bytes(self, config: EngineConfig) -> int:
        """See LoadedModel.step_bytes: those of a rank's device."""
        own = getattr(self._share.model, "step_bytes", None)
        if own is not None:
            return int(own(config))
        num_tokens, num_rows = config.max_num_batched_tokens, min(config.max_num_batched_tokens, config.max_num_seqs)
        item_size = self._share.model.embedding.element_size()
        each = torch_step_bytes(self._share.model.config, item_size, num_tokens, num_rows)
        return each * (self.ranks.size if self.shares_pool else 1)

    def expert_counts(self) -> Tensor | None:
        """See DecoderModel: every rank routes all tokens, so rank 0 counts them all."""
        own = getattr(self._share.model, "expert_counts", None)
        return own() if own is not None else None

    @property
    def device(self) -> torch.device:
        return self._share.device

    @property
    def embedding(self) -> Tensor:
        """Return the embedding: every rank has all of it."""
        return self._share.model.embedding

    @property
    def norm(self) -> Norm:
        """Return the norm before the head, which every rank has."""
        return self._share.model.norm

    @property
    def bytes_per_step(self) -> int:
        """See TritonModel: the bytes of all ranks."""
        return self.ranks.size * int(getattr(self._share.model, "bytes_per_step", 0))

    def first_layers(self, num_layers: int) -> NoReturn:
        """Raise ValueError: other ranks would have to compute them, too."""
        raise ValueError("tensor_parallel: the first layers alone are not computed together; leave self_draft out")

    def open_pool(self, shape: KVShape) -> KVPool:
        """Return the engine's pool, of which every rank has its heads. All ranks share its memory; or each has a pool of its own
        of this shape, and keys and values are moved by `copy_blocks` and `move_slots`.

        Raises ValueError for a second pool, and when a rank fails."""
        if self._has_pool:
            raise ValueError("tensor_parallel: the model has a pool already; load it once for each engine")
        self._has_pool = True
        dtype = str(shape.dtype).removeprefix("torch.")
        try:
            self.ranks.tell(Kind.POOL, tp_protocol.as_json({**asdict(shape), "dtype": dtype}))
            if self.shares_pool:
                return KVPool(shape, "cpu", before_seal=self._show)
            pool = KVPool(shape, self.device.type, shared=False)
            self.ranks.wait_for(Kind.READY)
            return pool
        except RankFailed as error:
            raise ValueError(str(error)) from error

    @property
    def shard(self) -> Shard:
        """Return rank 0's shard."""
        return self._group.shard

    def open_copies(self, shape: PiecesShape, fd: int) -> CopyChannel:
        """Let all ranks, which have a pool each, copy their heads to and from pieces in this memory from now on, as they are
        ordered (staging.py). Raises RankFailed."""
        self._tell(Kind.PIECES, tp_protocol.as_json(asdict(shape)))
        self.ranks.show_fd(fd)
        channel = CopyChannel(self.ranks, self.ranks.open_channels(), self._group.timeout_s)
        try:
            self.ranks.wait_for(Kind.READY)
        except BaseException:
            channel.close()
            raise
        return channel

    def copy_blocks(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Have the other ranks copy these blocks of their own pools, before the next step. Raises RankFailed."""
        self._tell(Kind.COPY, tp_protocol.encode_slots(sources, targets))

    def move_slots(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Have them copy slots: see `copy_blocks` and pdmesh/engine/kv_cache/moves.py."""
        self._tell(Kind.MOVE, tp_protocol.encode_slots(sources, targets))

    def watch(self, on_failure: Callable[[RankFailed], object]) -> None:
        """Call `on_failure` at once, from some thread, when a rank ends by itself, also when no step runs."""
        self.ranks.watch(partial(_end_exchanges, self._group, on_failure))

    def close(self) -> None:
        """End the other ranks and wait for their end; idempotent."""
        self.ranks.close()

    def _tell(self, kind: Kind, payload: bytes = b"") -> None:
        """Send a command to every rank. Raises RankFailed."""
        self.commands.num_told += 1  # before any rank gets it: a mark that is made meanwhile lies behind it
        self.ranks.tell(kind, payload)

    @contextmanager
    def _together(self) -> Iterator[None]:
        """Run what every rank does. On exit it is done here, without errors. Raises RankFailed."""
        try:
            yield
            self._group.wait()
        except ExchangeFailed as error:
            raise self.ranks.blame(error) from error
        self.ranks.check()  # when a rank dies NCCL may end exchanges with invalid numbers

    def _show(self, fd: int) -> None:
        self.ranks.show_fd(fd)
        self.ranks.wait_for(Kind.READY)


def _end_exchanges(group: Group, on_failure: Callable[[RankFailed], object], failure: RankFailed) -> None:
    group.abort()
    on_failure(failure)
