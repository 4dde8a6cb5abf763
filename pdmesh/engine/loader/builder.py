"""From a checkpoint's tensors to a decoder on the torch backend: what one rank and all ranks share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol, TypedDict

import torch
from torch import Tensor

from pdmesh.engine.attention.base import make_attention
from pdmesh.engine.loader.quantized.registry import SIDE_FILES
from pdmesh.engine.loader.safetensors import SafetensorsSource, WeightSource, checked, joined, weight_files
from pdmesh.engine.models.config import LATENT_EPS, ExpertsConfig, LatentConfig
from pdmesh.engine.models.decoder import DecoderLayer, DecoderModel, LatentMaps, sinks_of
from pdmesh.engine.models.experts import ClampedMLP, Experts
from pdmesh.engine.models.layers import (
    MLP,
    GatedMLP,
    Linear,
    Norm,
    PlainMLP,
    QKNorm,
    RotaryTable,
    Xielu,
    make_linear,
    temperatures,
)

Progress = Callable[[float, str], None]


_ATTENTION = "reference"
_TABLE_TOKENS = 8  # tables of positions are made for so many where nothing is computed


def open_checkpoint(path: Path, overrides: Sequence[str] = ()) -> tuple[WeightSource, list[Path]]:
    """Return the opened checkpoint and the files of its hash; `overrides` change what its config says (pdmesh/overrides.py).
    Raises ValueError saying what is at `path` instead."""
    if path.is_dir():
        beside = [path / name for name in SIDE_FILES if (path / name).is_file()]
        return SafetensorsSource(path, overrides), [path / "config.json", *beside, *weight_files(path)]
    if not path.is_file():
        raise ValueError(
            f"model: {path} does not exist; give a model folder or a .gguf file (`pdmesh models fetch` gets one by name)"
        )
    if path.suffix.lower() != ".gguf":
        raise ValueError(f"model: {path} is neither a folder nor a .gguf file")
    from pdmesh.engine.loader.gguf.source import GgufSource  # the gguf package is imported only for GGUF files

    return GgufSource(path, overrides), [path]


def numeric_mode(model: DecoderModel, device: str) -> str:
    """Return a name such as `float32-cpu-onednn-reference-AVX512`: dtype, device, linear kernel, attention backend, processor."""
    dtype = str(model.dtype).removeprefix("torch.")
    if device == "cuda":
        major, minor = torch.cuda.get_device_capability()
        processor = f"sm{major}{minor}"
    else:
        processor = torch.backends.cpu.get_cpu_capability()
    return f"{dtype}-{device}-{model.head.kind}-{model.attention.name}-{processor}"


class AroundExperts(TypedDict):
    """What a mixture of experts has besides them."""

    router: Tensor
    router_bias: Tensor | None
    correction: Tensor | None
    shared: MLP | None
    shared_gate: Tensor | None


class LinearMaps(Protocol):
    """Make the linear maps of a decoder whose weights are quantized."""

    def joined(self, parts: Sequence[tuple[str, int]], width: int, bias: Tensor | None) -> Linear: ...

    def head(self, weight: Tensor, bias: Tensor | None) -> Linear: ...


class TorchBuilder:
    """Take tensors out of a checkpoint, check their shapes, and fuse maps that are computed together."""

    def __init__(self, source: WeightSource, dtype: torch.dtype, device: str, maps: LinearMaps | None = None) -> None:
        """`maps` makes the linear maps where weights are quantized."""
        self.source, self.dtype, self.device, self.maps = source, dtype, device, maps
        self.config = source.config

    def build(self, max_context: int, progress: Progress) -> DecoderModel:
        config = self.config
        layers = []
        for index in range(config.num_layers):
            progress(index / (config.num_layers + 1), f"loading layer {index + 1} of {config.num_layers}")
            layers.append(self._layer(index))
        progress(config.num_layers / (config.num_layers + 1), "loading embeddings")
        embedding = self._tensor("model.embed_tokens.weight", config.vocab_size, config.hidden_size)
        ropes = [rope for rope in (config.rope, config.local_rope) if rope is not None and rope.rotary_dim]
        learned = (config.learned_positions, config.hidden_size)
        return DecoderModel(
            config,
            embedding=embedding,
            layers=layers,
            norm=self._norm("model.norm"),
            head=self._head(embedding),
            ropes=[RotaryTable(rope, max_context, dtype=self.dtype, device=self.device) for rope in ropes],
            attention=make_attention(_ATTENTION, config, self.device, sinks_of(layers)),
            positions=self._tensor("model.embed_positions.weight", *learned) if config.learned_positions else None,
            embedding_norm=self._norm("model.embed_norm") if config.embedding_norm else None,
            temperatures=temperatures(config.temperature, max_context).to(self.device) if config.temperature else None,
        )

    def _head(self, embedding: Tensor) -> Linear:
        weight = embedding if self.config.tie_word_embeddings else self._tensor("lm_head.weight", *embedding.shape)
        bias = self._tensor("lm_head.bias", len(embedding)) if self.config.head_bias else None
        return self._map(weight, bias) if self.maps is None else self.maps.head(weight, bias)

    def _layer(self, index: int) -> DecoderLayer:
        config, prefix = self.config, f"model.layers.{index}"
        attention, hidden = f"{prefix}.self_attn", config.hidden_size
        values = config.num_heads * (config.latent.value_dim if config.latent else config.head_dim)
        has_mlp_norm = config.pre_norm and config.mlp_norm
        is_local = config.local_rope is not None and config.windows[index] is not None
        return DecoderLayer(
            input_norm=self._norm(f"{prefix}.input_layernorm") if config.pre_norm else None,
            qkv=self._latent_input(attention, config.latent) if config.latent else self._qkv(attention),
            qk_norm=self._qk_norm(attention) if config.has_qk_norm(index) else None,
            output=self._linear([(f"{attention}.o_proj", hidden)], values, bias=config.output_bias),
            mlp_norm=self._norm(f"{prefix}.post_attention_layernorm") if has_mlp_norm else None,
            mlp=self._experts(f"{prefix}.mlp", config.experts)
            if config.has_experts(index) and config.experts
            else self._mlp(f"{prefix}.mlp"),
            post_attention_norm=self._norm(f"{prefix}.post_self_attn_norm") if config.post_norm else None,
            post_mlp_norm=self._norm(f"{prefix}.post_mlp_norm") if config.post_norm else None,
            sinks=self._tensor(f"{attention}.sinks", config.num_heads) if config.sinks else None,
            latent=self._latent(attention, config.latent) if config.latent else None,
            rope=(1 if is_local else 0) if config.is_rotated(index) else None,
        )

    def _qkv(self, attention: str) -> Linear:
        config = self.config
        query, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        parts = [(f"{attention}.{n}_proj", rows) for n, rows in zip("qkv", (query, kv, kv), strict=True)]
        return self._linear(parts, config.hidden_size, bias=config.qkv_bias)

    def _latent_input(self, attention: str, latent: LatentConfig) -> Linear:
        """Return the product of what reads the layer's input: the query's bottleneck, or the queries, and the latent."""
        config = self.config
        heads = config.num_heads * (latent.nope_dim + latent.rope_dim)
        query = (f"{attention}.q_a_proj", latent.query_rank) if latent.query_rank else (f"{attention}.q_proj", heads)
        parts = [query, (f"{attention}.kv_a_proj", latent.width)]
        biases = None
        if config.qkv_bias:  # queries without a bottleneck have none
            none = torch.zeros(query[1], dtype=self.dtype, device=self.device)
            own = self._tensor(f"{query[0]}.bias", query[1]) if latent.query_rank else none
            biases = joined((own, self._tensor(f"{parts[1][0]}.bias", latent.width)))
        weights = [self._tensor(f"{name}.weight", rows, config.hidden_size) for name, rows in parts]
        return self._map(joined(weights), biases)

    def _latent(self, attention: str, latent: LatentConfig) -> LatentMaps:
        heads, rank, nope = self.config.num_heads, latent.kv_rank, latent.nope_dim
        expanded = self._tensor(f"{attention}.kv_b_proj.weight", heads * (nope + latent.value_dim), rank)
        expanded = expanded.view(heads, nope + latent.value_dim, rank)
        keys, values = expanded[:, :nope], expanded[:, nope:]
        queries = [(f"{attention}.q_b_proj", heads * (nope + latent.rope_dim))]
        return LatentMaps(
            query_norm=self._norm(f"{attention}.q_a_norm", latent.query_rank, eps=LATENT_EPS) if latent.query_rank else None,
            queries=self._linear(queries, latent.query_rank, bias=False) if latent.query_rank else None,
            latent_norm=self._norm(f"{attention}.kv_a_norm", rank, eps=LATENT_EPS),
            key_map=keys.contiguous(),
            value_map=values.transpose(1, 2).contiguous(),
        )

    def _mlp(self, prefix: str, inner: int = 0, *, bias: bool | None = None) -> MLP:
        config = self.config
        inner, bias = inner or config.intermediate_size, config.mlp_bias if bias is None else bias
        down = self._linear([(f"{prefix}.down_proj", config.hidden_size)], inner, bias=bias)
        if not config.gated_mlp:
            up = self._linear([(f"{prefix}.up_proj", inner)], config.hidden_size, bias=bias)
            return PlainMLP(up, down, config.activation, self._xielu(prefix) if config.activation == "xielu" else None)
        gate_up = self._linear([(f"{prefix}.{name}_proj", inner) for name in ("gate", "up")], config.hidden_size, bias=bias)
        return GatedMLP(gate_up, down, config.activation)

    def _xielu(self, prefix: str) -> Xielu:
        stem = f"{prefix}.act_fn"
        learned = (self._tensor(f"{stem}.{name}", 1) for name in ("alpha_p", "alpha_n"))
        return Xielu(*learned, *(self._tensor(f"{stem}.{name}") for name in ("beta", "eps")))

    def _experts(self, prefix: str, experts: ExpertsConfig) -> MLP:
        return Experts(experts, experts=list(self._each_expert(prefix, experts)), **self._around_experts(prefix, experts))

    def _each_expert(self, prefix: str, experts: ExpertsConfig) -> Iterator[MLP | None]:
        return (self._expert(prefix, number, experts) for number in range(experts.num_experts))

    def _around_experts(self, prefix: str, experts: ExpertsConfig) -> AroundExperts:
        hidden, count, shared = self.config.hidden_size, experts.num_experts, experts.shared_intermediate_size
        return {
            "router": self._wide(f"{prefix}.router.weight", count, hidden),
            "router_bias": self._wide(f"{prefix}.router.bias", count) if experts.router_bias else None,
            "correction": self._wide(f"{prefix}.router.correction", count) if experts.has_correction else None,
            "shared": self._mlp(f"{prefix}.shared_expert", shared) if shared else None,
            "shared_gate": self._wide(f"{prefix}.shared_gate.weight", 1, hidden) if experts.shared_gate else None,
        }

    def _expert(self, prefix: str, number: int, experts: ExpertsConfig) -> MLP | None:
        """Return one expert; None where another rank has it."""
        prefix, inner = f"{prefix}.experts.{number}", experts.intermediate_size
        if experts.activation != "swiglu_oai":
            return self._mlp(prefix, inner, bias=experts.bias)
        gate_up = self._linear([(f"{prefix}.{n}_proj", inner) for n in ("gate", "up")], self.config.hidden_size, bias=True)
        down = self._linear([(f"{prefix}.down_proj", self.config.hidden_size)], inner, bias=True)
        return ClampedMLP(gate_up, down, experts.activation_limit)

    def _qk_norm(self, attention: str) -> QKNorm:
        """Return the norm of all heads: its weights one for all heads, one for each, or one vector over all."""
        config, dim = self.config, self.config.head_dim
        counts = {"q": config.num_heads, "k": config.num_kv_heads}
        shapes: dict[str, tuple[int, ...]] = {
            name: {"head": (dim,), "heads": (count, dim), "all": (count * dim,)}[config.qk_norm] for name, count in counts.items()
        }

        def rows(kind: str) -> Tensor:
            vectors = [self._tensor(f"{attention}.{name}_norm.{kind}", *shape) for name, shape in shapes.items()]
            return joined([each.view(-1, dim).expand(counts[name], dim) for name, each in zip(shapes, vectors, strict=True)])

        bias = rows("bias") if config.qk_norm_bias else None
        norm = Norm(rows("weight"), config.norm_eps, config.norm, bias, config.wide_norm)
        return QKNorm(norm, config.num_heads if config.qk_norm == "all" else 0)

    def _norm(self, name: str, width: int = 0, eps: float = 0.0) -> Norm:
        config, width = self.config, width or self.config.hidden_size
        bias = self._tensor(f"{name}.bias", width) if config.norm_bias else None
        return Norm(self._tensor(f"{name}.weight", width), eps or config.norm_eps, config.norm, bias, config.wide_norm)

    def _linear(self, parts: list[tuple[str, int]], width: int, *, bias: bool) -> Linear:
        """Return one product of several maps with the same input: parts are (name, output rows)."""
        biases = [self._tensor(f"{name}.bias", rows) for name, rows in parts] if bias else []
        joined_bias = joined(biases) if biases else None
        if self.maps is not None:
            return self.maps.joined(parts, width, joined_bias)
        return self._map(joined([self._tensor(f"{name}.weight", rows, width) for name, rows in parts]), joined_bias)

    def _map(self, weight: Tensor, bias: Tensor | None) -> Linear:
        """Return the map of an unquantized weight."""
        return make_linear(weight, bias)

    def _tensor(self, name: str, *shape: int) -> Tensor:
        return checked(self.source, name, shape).to(self.device, self.dtype)

    def _wide(self, name: str, *shape: int) -> Tensor:
        return checked(self.source, name, shape).to(self.device, torch.float32)


def ask_for_all(source: WeightSource) -> None:
    """Ask a source without numbers for every tensor of its model. Raises ValueError for one that is missing or has another
    shape."""
    TorchBuilder(source, torch.float32, "meta").build(_TABLE_TOKENS, lambda _share, _text: None)
