"""Granite 3 MoE: Granite's multipliers, experts that are stored as one tensor, in some a shared one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdmesh.engine.models.config import ExpertsConfig, ModelConfig, decoder
from pdmesh.engine.models.families.dense.granite import multipliers, with_windows
from pdmesh.engine.models.family import Family
from pdmesh.engine.models.names import Names, Place, Stored
from pdmesh.engine.models.reader import ConfigReader

if TYPE_CHECKING:
    from torch import Tensor


def read(config: ConfigReader) -> ModelConfig:
    """Read a Granite MoE's config.json, with `shared_intermediate_size` where it has a shared expert."""
    bias = config.flag("attention_bias")
    experts = ExpertsConfig(
        config.count("num_local_experts", "num_experts"),
        config.count("num_experts_per_tok", default=2),
        config.count("intermediate_size"),
        (True,) * config.count("num_hidden_layers"),
        scoring="softmax_topk",
        shared_intermediate_size=config.optional_count("shared_intermediate_size") or 0,
    )
    return decoder(config, qkv_bias=bias, output_bias=bias, experts=experts, **multipliers(config))


def read_swa(config: ConfigReader) -> ModelConfig:
    """Read the config.json of a Granite MoE with windows."""
    config.require("shared_intermediate_size", 0)
    return with_windows(config, read(config))


def gate(tensor: Tensor, place: Place) -> Tensor:
    """Take an expert's gate, or the shared one's, out of gate and up."""
    own = tensor[place.expert] if place.expert >= 0 else tensor
    return own[: own.shape[0] // 2]


def up(tensor: Tensor, place: Place) -> Tensor:
    """Take an expert's up, or the shared one's, out of gate and up."""
    own = tensor[place.expert] if place.expert >= 0 else tensor
    return own[own.shape[0] // 2 :]


def own(tensor: Tensor, place: Place) -> Tensor:
    """Take one expert's part."""
    return tensor[place.expert]


NAMES = Names(
    {
        "mlp.router": "block_sparse_moe.router.layer",
        "mlp.experts.{}.gate_proj": Stored("block_sparse_moe.input_linear", (gate,)),
        "mlp.experts.{}.up_proj": Stored("block_sparse_moe.input_linear", (up,)),
        "mlp.experts.{}.down_proj": Stored("block_sparse_moe.output_linear", (own,)),
        "mlp.shared_expert.gate_proj": Stored("shared_mlp.input_linear", (gate,)),
        "mlp.shared_expert.up_proj": Stored("shared_mlp.input_linear", (up,)),
        "mlp.shared_expert.down_proj": "shared_mlp.output_linear",
    }
)
FAMILY = Family(read, NAMES)
_NO_ENDING = {"weight": ""}
SWA = Family(
    read_swa,
    Names(
        {
            "mlp.router": "block_sparse_moe.router",
            "mlp.experts.{}.gate_proj": Stored("block_sparse_moe.experts.gate_up_proj", (gate,), _NO_ENDING),
            "mlp.experts.{}.up_proj": Stored("block_sparse_moe.experts.gate_up_proj", (up,), _NO_ENDING),
            "mlp.experts.{}.down_proj": Stored("block_sparse_moe.experts.down_proj", (own,), _NO_ENDING),
        }
    ),
)
