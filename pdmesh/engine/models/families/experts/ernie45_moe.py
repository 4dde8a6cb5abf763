"""ERNIE 4.5 MoE: ERNIE's attention, experts chosen with a correction that is added to their probabilities, a shared one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdmesh.engine.models.config import Defaults, ExpertsConfig, ModelConfig, decoder
from pdmesh.engine.models.families.dense.helium import PAIRS
from pdmesh.engine.models.families.experts.glm_moe import STEMS
from pdmesh.engine.models.family import Family
from pdmesh.engine.models.names import Names, Place, Stored, changed, halves_from_pairs, joined
from pdmesh.engine.models.reader import ConfigReader

if TYPE_CHECKING:
    from torch import Tensor


def read(config: ConfigReader) -> ModelConfig:
    """Read an ERNIE 4.5 MoE's config.json."""
    bias, num_layers = config.flag("use_bias"), config.count("num_hidden_layers")
    first, interval = config.optional_count("moe_layer_start_index"), config.count("moe_layer_interval", default=1)
    first = 1 if first is None else first
    last = config.get("moe_layer_end_index")
    last = num_layers - 1 if last in (None, -1) or not isinstance(last, int) else last
    config.ignore("moe_norm_min", "moe_capacity", "moe_aux_loss_lambda", "moe_use_aux_free", "moe_gate", "use_moe")
    inner = config.count("moe_intermediate_size")
    experts = ExpertsConfig(
        config.count("moe_num_experts"),
        config.count("moe_k", default=6),
        inner,
        tuple((layer + 1) % interval == 0 and first <= layer <= last for layer in range(num_layers)),
        normalize=True,
        has_correction=True,
        bias=bias,
        shared_intermediate_size=inner * (config.optional_count("moe_num_shared_experts") or 0),
    )
    return decoder(
        config,
        Defaults(norm_eps=1e-5, rope_theta=5e5, tie=True),
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=bias,
        experts=experts,
    )


def _flat(tensor: Tensor, place: Place) -> Tensor:
    return tensor.flatten() if place.kind == "correction" else tensor


FAMILY = Family(
    read,
    Names(
        joined(
            changed(halves_from_pairs, PAIRS),
            STEMS,
            {"mlp.router.correction": Stored("mlp.moe_statics", (_flat,), {"correction": "e_score_correction_bias"})},
        )
    ),
)
