"""From a checkpoint to one rank's share of its model, and from the shares to a model that all ranks compute together."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.attention import AttentionBackend
from engine.config import EngineConfig
from engine.kernels.cpu.threads import default_threads
from engine.layers import GatedMLP, Linear, make_linear
from engine.memory import effective_max_context
from engine.model import DecoderLayer, DecoderModel
from engine.model_config import ModelConfig
from engine.numerics import Numerics, choose_numerics
from engine.parallel.attention import SharedPoolAttention
from engine.parallel.errors import ExchangeFailed, RankFailed
from engine.parallel.group import Group, open_meeting_point
from engine.parallel.layers import GatheredHead, SummedLinear
from engine.parallel.model import ParallelModel
from engine.parallel.ranks import Ranks
from engine.parallel.split import Shard, ShardSource
from engine.parallel.wire import Kind
from engine.weights.loader import Progress, TorchBuilder, open_checkpoint
from engine.weights.source import WeightSource
from engine.weights.tensors import checked


def load_with_ranks(source: WeightSource, config: EngineConfig, numerics: Numerics, progress: Progress) -> ParallelModel:
    """Rank 0's share, and the other ranks' processes, each with its own. Raises ValueError: a rank failed (RankFailed), or the
    machine has too few devices; no process is left then."""
    _check_machine(config)
    torch.set_num_threads(_threads_each(config))
    shard = Shard(0, config.tensor_parallel)
    ranks = Ranks(shard.size, config.tensor_parallel_timeout_s)
    try:
        ranks.tell_settings({"size": shard.size, "engine": asdict(replace(config, num_threads=_threads_each(config)))})
        model = _build(source, config, numerics.dtype, shard, progress)
        ranks.wait_for(Kind.LOADED)
        store = open_meeting_point(shard.size)
        ranks.tell(Kind.MEET, b'{"port": %d}' % store.port)
        group = Group(store, shard, config.device, config.tensor_parallel_timeout_s)
        return ParallelModel(join(model, source.config, group), ranks, group)
    except (RankFailed, ExchangeFailed) as error:
        ranks.close()
        raise ValueError(str(error)) from error
    except BaseException:
        ranks.close()
        raise


def load_shard(config: EngineConfig, shard: Shard) -> tuple[ModelConfig, DecoderModel]:
    """In another rank's process: the whole model's configuration, and this rank's share of its weights."""
    torch.set_num_threads(config.num_threads)
    source, _ = open_checkpoint(Path(config.model))
    numerics = choose_numerics(config, source.config, has_int4=False, no_library="it was not asked for")
    return source.config, _build(source, config, numerics.dtype, shard, lambda _share, _text: None)


def join(model: DecoderModel, whole: ModelConfig, group: Group) -> DecoderModel:
    """A share that meets the others where sums are needed. Its pool: see `attention.py` for the CPU; its own on a device."""
    return DecoderModel(
        model.config,
        embedding=model.embedding,
        layers=[_joined(layer, group) for layer in model.layers],
        norm=model.norm,
        head=GatheredHead(model.head, whole.vocab_size, group),
        rotary=model.rotary,
        attention=_on_shared_pool(model, whole, group.shard) if model.device.type == "cpu" else model.attention,
    )


def _joined(layer: DecoderLayer, group: Group) -> DecoderLayer:
    mlp = GatedMLP(layer.mlp.gate_up, SummedLinear(layer.mlp.down, group))
    return replace(layer, output=SummedLinear(layer.output, group), mlp=mlp)


def _on_shared_pool(model: DecoderModel, whole: ModelConfig, shard: Shard) -> AttentionBackend:
    return SharedPoolAttention(model.config, str(model.device), shard.part(whole.num_kv_heads), whole.num_kv_heads)


def _build(
    source: WeightSource, config: EngineConfig, dtype: torch.dtype, shard: Shard, progress: Callable[[float, str], None]
) -> DecoderModel:
    max_context = effective_max_context(config, source.config)
    return _ShardBuilder(source, dtype, config.device, shard).build(max_context, progress)


class _ShardBuilder(TorchBuilder):
    """Builds what one rank has. Only the head needs a word: its vocabulary is cut, that of the embeddings is not."""

    def __init__(self, source: WeightSource, dtype: torch.dtype, device: str, shard: Shard) -> None:
        super().__init__(ShardSource(source, shard), dtype, device)
        self._shard = shard

    def _head(self, embedding: Tensor) -> Linear:
        vocab_size = self.config.vocab_size
        whole = embedding if self.config.tie_word_embeddings else checked(self.source, "lm_head.weight", tuple(embedding.shape))
        rows = self._shard.vocabulary(vocab_size)
        missing = self._shard.vocabulary_rows(vocab_size) - len(rows)
        return make_linear(F.pad(whole[rows.start : rows.stop], (0, 0, 0, missing)).to(self.device, self.dtype))


def _threads_each(config: EngineConfig) -> int:
    return max(1, (config.num_threads or default_threads()) // config.tensor_parallel)


def _check_machine(config: EngineConfig) -> None:
    if config.device == "cpu" and sys.platform != "linux":
        raise ValueError("tensor_parallel: on the CPU ranks share memory as Linux has it; give 1")
    num_devices = torch.cuda.device_count()
    if config.device == "cuda" and num_devices < config.tensor_parallel:
        asked = f"tensor_parallel: {config.tensor_parallel} ranks need a GPU each"
        raise ValueError(f"{asked}, there are {num_devices}; give at most that")
