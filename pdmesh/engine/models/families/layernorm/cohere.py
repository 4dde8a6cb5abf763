"""Command-R (Cohere 1) and Cohere 2: attention and MLP in parallel behind one LayerNorm without bias, neighbours rotated
together, scaled logits; in Cohere 2 windows, and layers between that see everything and are not rotated."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdmesh.engine.models.config import Defaults, ModelConfig, decoder, every, layer_windows
from pdmesh.engine.models.families.dense.helium import PAIRS
from pdmesh.engine.models.family import Family
from pdmesh.engine.models.names import Names, Place, Stored, changed, halves_from_pairs, joined, pair_order
from pdmesh.engine.models.reader import ConfigReader

if TYPE_CHECKING:
    from torch import Tensor


def read_cohere(config: ConfigReader) -> ModelConfig:
    """Read a Command-R's config.json; Command-R+ has norms of query and key heads."""
    theta = config.number("rope_theta", default=5e5)
    return _decoder(config, theta, qk_norm="heads" if config.flag("use_qk_norm") else "")


def read_cohere2(config: ConfigReader) -> ModelConfig:
    """Read a Cohere 2's config.json: every fourth layer sees everything, unless `layer_types` says which."""
    num_layers, window = config.count("num_hidden_layers"), config.count("sliding_window", default=4096)
    period = config.count("sliding_window_pattern", "_sliding_window_pattern", default=4)
    config.ignore("order_of_interleaved_layers", "position_embedding_type", "rotary_pct", "use_embedding_sharing")
    config.ignore("use_gated_activation", "use_parallel_block", "use_parallel_embedding", "use_qk_norm", "cache_implementation")
    windows = layer_windows(config, num_layers, window)
    windows = windows or tuple(None if last else window for last in every(num_layers, period))
    return _decoder(config, 1e4, windows=windows, rotated=tuple(own is not None for own in windows))


def _decoder(config: ConfigReader, theta: float, **parts: object) -> ModelConfig:
    bias = config.flag("attention_bias")
    return decoder(
        config,
        Defaults(norm_eps=1e-5, tie=True, rope_theta=theta, max_context=8192, names={"rms_norm_eps": "layer_norm_eps"}),
        norm="layer",
        wide_norm=True,
        parallel=True,
        mlp_norm=False,
        qkv_bias=bias,
        output_bias=bias,
        logits_multiplier=config.number("logit_scale", default=0.0625),
        **parts,
    )


def norm_halves(tensor: Tensor, place: Place) -> Tensor:
    """Reorder the norm weights [heads, head_dim] as the heads are."""
    return tensor[:, pair_order(place.config.head_dim, place.config.rope.rotary_dim).to(tensor.device)]


_NORMS = {stem: Stored(stem, (norm_halves,)) for stem in ("self_attn.q_norm", "self_attn.k_norm")}
COHERE = Family(read_cohere, Names(joined(changed(halves_from_pairs, PAIRS), _NORMS)))
COHERE2 = Family(read_cohere2, Names(changed(halves_from_pairs, PAIRS)))
