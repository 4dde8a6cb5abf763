"""GPT-OSS: experts with biases and a clamped activation, attention sinks, every second layer with a window."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdmesh.engine.models.config import Defaults, ExpertsConfig, ModelConfig, decoder, layer_windows
from pdmesh.engine.models.family import Family
from pdmesh.engine.models.names import Names, Place, Stored
from pdmesh.engine.models.reader import ConfigReader

if TYPE_CHECKING:
    from torch import Tensor


def read(config: ConfigReader) -> ModelConfig:
    """Read a GPT-OSS' config.json."""
    num_layers, window = config.count("num_hidden_layers"), config.count("sliding_window", default=128)
    config.ignore("initial_context_length")  # said again by the rotary embedding's parameters
    config.require("swiglu_alpha", 1.702)
    bias = config.flag("attention_bias", True)
    experts = ExpertsConfig(
        config.count("num_local_experts", "num_experts", default=128),
        config.count("num_experts_per_tok", "experts_per_token", default=4),
        config.count("intermediate_size"),
        (True,) * num_layers,
        scoring="softmax_topk",
        router_bias=True,
        bias=True,
        activation="swiglu_oai",
        activation_limit=config.number("swiglu_limit", default=7.0),
    )
    config.ignore("experts_per_token")
    windows = layer_windows(config, num_layers, window)
    return decoder(
        config,
        Defaults(head_dim=64, norm_eps=1e-5, rope_theta=150000.0),
        qkv_bias=bias,
        output_bias=bias,
        sinks=True,
        windows=windows or tuple(None if layer % 2 else window for layer in range(num_layers)),
        experts=experts,
    )


def _gate(tensor: Tensor, place: Place) -> Tensor:
    """Take an expert's gate out of columns in which gate and up alternate; weights are stored [in, out]."""
    return tensor[place.expert][..., ::2].t().contiguous() if place.kind == "weight" else tensor[place.expert][::2]


def _up(tensor: Tensor, place: Place) -> Tensor:
    return tensor[place.expert][..., 1::2].t().contiguous() if place.kind == "weight" else tensor[place.expert][1::2]


def _down(tensor: Tensor, place: Place) -> Tensor:
    return tensor[place.expert].t().contiguous() if place.kind == "weight" else tensor[place.expert]


def _kinds(stem: str) -> dict[str, str]:
    """Return the endings of what is stored without any: biases are tensors of their own name."""
    return {"weight": stem, "bias": f"{stem}_bias"}


FAMILY = Family(
    read,
    Names(
        {
            "mlp.router": "mlp.router",
            "mlp.experts.{}.gate_proj": Stored("mlp.experts", (_gate,), _kinds("gate_up_proj")),
            "mlp.experts.{}.up_proj": Stored("mlp.experts", (_up,), _kinds("gate_up_proj")),
            "mlp.experts.{}.down_proj": Stored("mlp.experts", (_down,), _kinds("down_proj")),
        }
    ),
)
