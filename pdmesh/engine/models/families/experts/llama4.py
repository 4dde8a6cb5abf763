"""Llama 4 (text): attention in chunks with layers between that see everything, are not rotated and have queries that grow with
their position; a shared expert and one that a sigmoid weighs before it computes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdmesh.engine.models.config import Defaults, ExpertsConfig, ModelConfig, TemperatureConfig, decoder, every
from pdmesh.engine.models.families.dense.helium import PAIRS
from pdmesh.engine.models.family import Family
from pdmesh.engine.models.names import Names, Place, Stored, changed, halves_from_pairs, head_ones, joined
from pdmesh.engine.models.reader import ConfigReader, UnsupportedModel

if TYPE_CHECKING:
    from torch import Tensor


def read(config: ConfigReader) -> ModelConfig:
    """Read a Llama 4's text config; `no_rope_layers` holds 1 for a layer that is rotated."""
    config.ignore("router_jitter_noise", "router_aux_loss_coef", "for_llm_compressor")
    num_layers = config.count("num_hidden_layers")
    rotated = _rotated(config, num_layers)
    bias = config.flag("attention_bias")
    return decoder(
        config,
        Defaults(norm_eps=1e-5, rope_theta=5e5),
        intermediate_size=config.count("intermediate_size_mlp", default=16384),
        qkv_bias=bias,
        output_bias=bias,
        qk_norm="head" if config.flag("use_qk_norm", True) else "",
        qk_norm_rotated=True,
        rotated=rotated,
        windows=_chunks(config, rotated),
        chunked=True,
        temperature=_temperature(config),
        experts=_experts(config, num_layers),
    )


def _rotated(config: ConfigReader, num_layers: int) -> tuple[bool, ...]:
    interval = config.count("no_rope_layer_interval", default=4)
    flags = config.get("no_rope_layers")
    if not isinstance(flags, list) or not flags:
        return tuple(not last for last in every(num_layers, interval))
    if len(flags) < num_layers:
        raise ValueError(f"no_rope_layers: {len(flags)} entries for {num_layers} layers")
    return tuple(bool(flag) for flag in flags[:num_layers])


def _chunks(config: ConfigReader, rotated: tuple[bool, ...]) -> tuple[int | None, ...]:
    """Return the size of each layer's chunks: of those that are rotated, unless `layer_types` says which."""
    size, kinds = config.optional_count("attention_chunk_size"), config.texts("layer_types")
    kinds = kinds or ["chunked_attention" if own else "full_attention" for own in rotated]
    for kind in kinds:
        if kind not in ("chunked_attention", "full_attention"):
            raise UnsupportedModel(f"layer_types: {kind!r} is not supported; layers are full_attention or chunked_attention")
    return tuple(size or None if kind == "chunked_attention" else None for kind in kinds[: len(rotated)])


def _temperature(config: ConfigReader) -> TemperatureConfig | None:
    scale, period = config.number("attn_scale", default=0.1), config.count("floor_scale", default=8192)
    is_on = config.flag("attn_temperature_tuning", True)
    return TemperatureConfig(scale, period, offset=1, of_rotated=False) if is_on else None


def _experts(config: ConfigReader, num_layers: int) -> ExpertsConfig:
    step, mixed = config.count("interleave_moe_layer_step", default=1), config.get("moe_layers")
    layers = tuple(layer in mixed for layer in range(num_layers)) if isinstance(mixed, list) else every(num_layers, step)
    inner = config.count("intermediate_size")
    return ExpertsConfig(
        config.count("num_local_experts", default=16),
        config.count("num_experts_per_tok", default=1),
        inner,
        layers,
        scoring="sigmoid_topk",
        scales_input=True,
        shared_intermediate_size=inner,
    )


def _half(number: int) -> Stored:
    """Return where gate (0) or up (1) of all experts lies: one tensor [experts, in, 2 * inner]."""

    def change(tensor: Tensor, place: Place) -> Tensor:
        return tensor[place.expert].chunk(2, dim=-1)[number].t().contiguous()

    return Stored("feed_forward.experts.gate_up_proj", (change,), {"weight": ""})


def _down(tensor: Tensor, place: Place) -> Tensor:
    return tensor[place.expert].t().contiguous()


_MLP = {f"mlp.{stem}": f"feed_forward.{stem}" for stem in ("router", *(f"{name}_proj" for name in ("gate", "up", "down")))}
_SHARED = {f"mlp.shared_expert.{n}_proj": f"feed_forward.shared_expert.{n}_proj" for n in ("gate", "up", "down")}
FAMILY = Family(
    read,
    Names(
        joined(
            _MLP,
            _SHARED,
            {
                "mlp.experts.{}.gate_proj": _half(0),
                "mlp.experts.{}.up_proj": _half(1),
                "mlp.experts.{}.down_proj": Stored("feed_forward.experts.down_proj", (_down,), {"weight": ""}),
            },
            changed(halves_from_pairs, PAIRS),
            {stem: Stored("", (head_ones,)) for stem in ("self_attn.q_norm", "self_attn.k_norm")},
        )
    ),
)
