"""Loading of one rank's share of a model, and of a model that all ranks compute together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pdmesh.engine.backend_selection import Numerics, choose_numerics, wants_triton
from pdmesh.engine.config import EngineConfig
from pdmesh.engine.kernels.cpu.library import default_threads
from pdmesh.engine.kernels.triton.support import why_not_here
from pdmesh.engine.loader.builder import Progress, TorchBuilder, numeric_mode, open_checkpoint
from pdmesh.engine.loader.kv_scales import pool_scales
from pdmesh.engine.loader.safetensors import WeightSource, checked
from pdmesh.engine.memory import effective_max_context
from pdmesh.engine.models.config import ExpertsConfig, ModelConfig
from pdmesh.engine.models.decoder import DecoderLayer, DecoderModel, sinks_of
from pdmesh.engine.models.experts import Experts
from pdmesh.engine.models.layers import MLP, GatedMLP, Linear, PlainMLP, make_linear
from pdmesh.engine.parallel.collectives import GatheredHead, Group, SummedLinear, open_meeting_point
from pdmesh.engine.parallel.model import ParallelModel
from pdmesh.engine.parallel.share import Share, SharedPoolAttention
from pdmesh.engine.parallel.split import Shard, ShardSource
from pdmesh.engine.parallel.tp_group import TensorParallelGroup
from pdmesh.engine.parallel.tp_protocol import ExchangeFailed, Kind, RankFailed

if TYPE_CHECKING:
    from pdmesh.engine.parallel.quantized import SharedMaps


Join = Callable[[Group], Share]


def load_with_ranks(
    source: WeightSource, config: EngineConfig, numerics: Numerics, progress: Progress
) -> tuple[ParallelModel, str]:
    """Load rank 0's share, start the other ranks' processes, each with its own, and return both with the numeric mode. Raises
    ValueError: a rank failed (RankFailed), or the machine has too few devices; all processes have ended then."""
    _check_machine(config)
    torch.set_num_threads(_threads_each(config))
    shard = Shard(0, config.tensor_parallel)
    shares_pool = ranks_share_pool(config)
    ranks = TensorParallelGroup(shard.size, config.tensor_parallel_timeout_s)
    try:
        engine = asdict(replace(config, num_threads=_threads_each(config)))
        ranks.tell_settings({"size": shard.size, "shares_pool": shares_pool, "engine": engine})
        parts = _Parts(source, config, numerics, shard, progress, shares_pool=shares_pool)
        ranks.wait_for(Kind.LOADED)
        store = open_meeting_point(shard.size)
        ranks.tell(Kind.MEET, b'{"port": %d}' % store.port)
        group = Group(store, shard, config.device, config.tensor_parallel_timeout_s)
        share, mode = parts.joined(group)
        return ParallelModel(share, ranks, group, shares_pool=shares_pool), mode
    except (RankFailed, ExchangeFailed) as error:
        ranks.close()
        raise ValueError(str(error)) from error
    except BaseException:
        ranks.close()
        raise


def ranks_share_pool(config: EngineConfig) -> bool:
    """Return whether all ranks map one pool with all heads; else each has one of its own, with its own heads."""
    return config.device == "cpu"


def load_shard(config: EngineConfig, shard: Shard, *, shares_pool: bool) -> Join:
    """Load this rank's share of the weights, in another rank's process; it then needs only the group."""
    torch.set_num_threads(config.num_threads)
    source, _ = open_checkpoint(Path(config.model), config.override)
    no_triton = why_not_here(config.device) if wants_triton(config) else ""
    numerics = choose_numerics(
        config, source.config, has_int4=False, no_library="it was not asked for", no_triton=no_triton
    )  # the same choice as rank 0's: `has_int4` and the library are for the native kernels
    parts = _Parts(source, config, numerics, shard, lambda _share, _text: None, shares_pool=shares_pool)
    return lambda group: parts.joined(group)[0]


class _Parts:
    """Hold one rank's weights, before ranks are connected."""

    def __init__(
        self,
        source: WeightSource,
        config: EngineConfig,
        numerics: Numerics,
        shard: Shard,
        progress: Progress,
        *,
        shares_pool: bool,
    ) -> None:
        self._whole, self._config, self._numerics, self._shares_pool = source.config, config, numerics, shares_pool
        self._max_context, self._kv_scales = effective_max_context(config, source.config), pool_scales(source, numerics.kv_dtype)
        maps = _shared_maps(source, config, numerics, shard) if numerics.is_quantized else None
        part = _RankPart(shard, expert_parallel=config.expert_parallel)
        self._decoder = _ShardBuilder(source, numerics.dtype, config.device, part, maps).build(self._max_context, progress)

    def joined(self, group: Group) -> tuple[Share, str]:
        """Return the share that exchanges sums with the others, and its numeric mode, which is that of a single rank."""
        whole, config = self._whole, self._config
        decoder = _joined_decoder(self._decoder, whole, group)
        # Of a latent there is one head, which every rank writes with the same bits.
        heads = range(1) if whole.latent else group.shard.part(whole.num_kv_heads)
        if self._numerics.backend == "triton":
            if whole.qk_norm == "all":
                raise ValueError("tensor_parallel: the Triton kernels have no QK norm over the heads of several ranks; give 1")
            from pdmesh.engine.loader.triton import triton_model  # triton is not installed everywhere

            model, mode = triton_model(decoder, config, self._numerics, self._max_context, self._kv_scales)
            return Share(model, heads if self._shares_pool else None), mode
        if self._shares_pool:
            sinks = sinks_of(decoder.layers)
            decoder.attention = SharedPoolAttention(decoder.config, config.device, heads, whole.pool_heads, sinks)
        return Share(decoder, None), numeric_mode(decoder, config.device)


def _joined_decoder(model: DecoderModel, whole: ModelConfig, group: Group) -> DecoderModel:
    return DecoderModel(
        model.config,
        embedding=model.embedding,
        layers=[_joined(layer, group) for layer in model.layers],
        norm=model.norm,
        head=GatheredHead(model.head, whole.vocab_size, group),
        ropes=model.ropes,
        attention=model.attention,
        positions=model.positions,
        embedding_norm=model.embedding_norm,
        temperatures=model.temperatures,
    )


def _joined(layer: DecoderLayer, group: Group) -> DecoderLayer:
    norm = None if layer.qk_norm is None else layer.qk_norm.summed(group.sum, group.shard.size)
    return replace(layer, qk_norm=norm, output=SummedLinear(layer.output, group), mlp=_joined_mlp(layer.mlp, group))


def _joined_mlp(mlp: MLP, group: Group) -> MLP:
    if isinstance(mlp, Experts):
        return mlp.summed(group.sum)
    if isinstance(mlp, PlainMLP):
        return mlp.with_down(SummedLinear(mlp.down, group))
    assert isinstance(mlp, GatedMLP)
    return mlp.with_down(SummedLinear(mlp.down, group))


def _shared_maps(source: WeightSource, config: EngineConfig, numerics: Numerics, shard: Shard) -> SharedMaps:
    from pdmesh.engine.parallel.quantized import SharedMaps

    return SharedMaps(source, numerics, config.device, shard)


@dataclass(frozen=True)
class _RankPart:
    """Say which part of the weights a rank has."""

    shard: Shard
    expert_parallel: bool = False

    def has_expert(self, number: int, num_experts: int) -> bool:
        """Return whether this rank computes a part of the expert, or all of it."""
        return not self.expert_parallel or number in self.shard.part(num_experts)


class _ShardBuilder(TorchBuilder):
    """Build one rank's share. Two things are special: the head's vocabulary is cut, that of the embeddings is not; and experts
    may be those of this rank alone."""

    def __init__(
        self, source: WeightSource, dtype: torch.dtype, device: str, part: _RankPart, maps: SharedMaps | None = None
    ) -> None:
        super().__init__(ShardSource(source, part.shard, expert_parallel=part.expert_parallel), dtype, device, maps)
        self._part = part

    def _head(self, embedding: Tensor) -> Linear:
        config = self.config
        whole = embedding if config.tie_word_embeddings else checked(self.source, "lm_head.weight", tuple(embedding.shape))
        weight = self._own_vocabulary(whole)
        bias = self._own_vocabulary(self._tensor("lm_head.bias", config.vocab_size)) if config.head_bias else None
        return make_linear(weight, bias) if self.maps is None else self.maps.head(weight, bias)

    def _own_vocabulary(self, whole: Tensor) -> Tensor:
        """Return this rank's rows, and zeros where the last ranks have fewer."""
        rows, count = self._part.shard.vocabulary(len(whole)), self._part.shard.vocabulary_rows(len(whole))
        own = whole[rows.start : rows.stop].to(self.device, self.dtype)
        return own if len(own) == count else torch.cat((own, own.new_zeros((count - len(own), *own.shape[1:]))))

    def _expert(self, prefix: str, number: int, experts: ExpertsConfig) -> MLP | None:
        has_it = self._part.has_expert(number, experts.num_experts)
        return super()._expert(prefix, number, experts) if has_it else None


def _threads_each(config: EngineConfig) -> int:
    return max(1, (config.num_threads or default_threads()) // config.tensor_parallel)


def _check_machine(config: EngineConfig) -> None:
    num_devices = torch.cuda.device_count()
    if config.device == "cuda" and num_devices < config.tensor_parallel:
        asked = f"tensor_parallel: {config.tensor_parallel} ranks need a GPU each"
        raise ValueError(f"{asked}, there are {num_devices}; give at most that")
