"""The parts of a decoder: one vocabulary in which every family's config.json is described (pdmesh/engine/models/registry.py).

`ModelConfig.parts` names those that go beyond a Llama's. A backend says which of them it computes; a model runs on the fastest
backend that has all of its parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from pdmesh.engine.models.reader import ConfigReader, UnsupportedModel
from pdmesh.engine.models.rope import RopeConfig

ACTIVATIONS = {
    "silu": "silu", "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu_fast": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
}  # fmt: skip
"""transformers' names of activations, and what is computed."""


@dataclass(frozen=True)
class ExpertsConfig:
    """A mixture of experts. `layers[i]`: whether layer i has one; the others have a dense MLP.

    A token's router logits become scores by `scoring`, over all experts or (`_topk`) over those chosen. Where `num_groups`
    is more than 1, only the best `top_groups` groups are eligible, each ranked by `group_rank`: its best expert, or the sum of
    its two best. `has_correction`: a bias decides which experts are chosen, not how much they count."""

    num_experts: int
    top_k: int
    intermediate_size: int
    layers: tuple[bool, ...]
    scoring: str = "softmax"  # softmax, sigmoid, softmax_topk, sigmoid_topk, sparsemixer
    normalize: bool = False  # the chosen experts' scores are divided by their sum
    scale: float = 1.0  # of the chosen scores
    num_groups: int = 1
    top_groups: int = 1
    group_rank: str = "max"  # max, top2
    has_correction: bool = False
    router_bias: bool = False
    bias: bool = False  # of the experts' maps
    scales_input: bool = False  # the score multiplies an expert's input, not its output (Llama 4)
    router_jitter: float = 0.0  # sparsemixer's distance within which experts compete (Phi-3.5-MoE)
    shared_intermediate_size: int = 0  # of an expert that every token takes; 0: none
    shared_gate: bool = False  # a learned factor in (0, 1) on the shared expert's output
    activation: str = ""  # of the experts, where it is not the MLP's; swiglu_oai: clamped, with a linear part (GPT-OSS)
    activation_limit: float = 0.0


@dataclass(frozen=True)
class TemperatureConfig:
    """Queries grow with their position p, by 1 + scale * log(1 + floor((p + offset) / period)), in all layers or in those without
    rotation (Nakanishi, Scalable-Softmax, 2025)."""

    scale: float
    period: int
    offset: int = 0
    of_rotated: bool = True


LATENT_EPS = 1e-6
"""Of the norms inside latent attention, whatever the others have."""


@dataclass(frozen=True)
class LatentConfig:
    """Latent attention (DeepSeek-V2, 2024): the cache holds a latent of `kv_rank` numbers and `rope_dim` rotated ones a token."""

    query_rank: int  # of the query's own bottleneck; 0: none
    kv_rank: int
    nope_dim: int  # of a head's query and key: without rotation
    rope_dim: int
    value_dim: int

    @property
    def width(self) -> int:
        """Return the numbers that the cache holds for a token and layer."""
        return self.kv_rank + self.rope_dim


@dataclass(frozen=True)
class WeightCount:
    """Count the weights of a decoder's layers. `shared`: those that every token is multiplied with; `expert`: those of one
    expert, in all layers that have experts. A token takes `top_k` of them in each layer, memory holds all."""

    shared: int
    expert: int = 0
    num_experts: int = 0
    top_k: int = 0

    @property
    def active(self) -> int:
        """Return the weights that a token is multiplied with."""
        return self.shared + self.top_k * self.expert

    @property
    def total(self) -> int:
        """Return the weights that memory holds."""
        return self.shared + self.num_experts * self.expert


@dataclass(frozen=True)
class ModelConfig:
    """Hold shapes and switches of one decoder. `windows[i]` is layer i's sliding window in tokens, None for full attention; of
    `chunked` attention the size of its chunks, which no token looks beyond."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_context: int
    norm_eps: float
    tie_word_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    windows: tuple[int | None, ...]
    rope: RopeConfig
    eos_token_ids: frozenset[int]
    dtype: str | None  # the checkpoint's, such as "bfloat16"; None when it does not say
    # Norms.
    qk_norm: str = ""  # head: one weight for all heads; heads: one for each; all: over all heads together
    qk_norm_bias: bool = False
    qk_norm_rotated: bool = False  # of what is rotated already; layers without rotation have none
    embedding_norm: bool = False  # of what the first layer reads
    norm: str = "rms"  # or layer
    norm_bias: bool = False
    wide_norm: bool = False  # weights multiply before the result is rounded to the dtype (Gemma), not after (Llama)
    pre_norm: bool = True  # of what attention and MLP read
    post_norm: bool = False  # of what they give
    parallel: bool = False  # both read the same states, and are added together
    mlp_norm: bool = True  # in parallel, the MLP has a norm of its own
    # MLP.
    activation: str = "silu"
    gated_mlp: bool = True
    experts: ExpertsConfig | None = None
    # Positions.
    local_rope: RopeConfig | None = None  # of the layers with a window, where it is another
    rotated: tuple[bool, ...] = ()  # layers whose heads are rotated; empty: all
    learned_positions: int = 0  # rows of a table that is added to the embeddings
    # Attention.
    attention_scale: float = 0.0  # of scores; 0: head_dim ** -0.5
    attention_softcap: float = 0.0
    chunked: bool = False
    temperature: TemperatureConfig | None = None
    sinks: bool = False  # a learned logit for each head takes its part of the softmax
    latent: LatentConfig | None = None
    # Multipliers.
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_multiplier: float = 1.0
    logits_softcap: float = 0.0
    head_bias: bool = False

    @property
    def num_groups(self) -> int:
        """Return the query heads that share one key/value head."""
        return self.num_heads // self.num_kv_heads

    @property
    def scale(self) -> float:
        """Return the factor of attention's scores."""
        return self.attention_scale or self.head_dim**-0.5

    @property
    def pool_heads(self) -> int:
        """Return the key/value heads of a token in the KV pool. Of a latent there is one."""
        return 1 if self.latent else self.num_kv_heads

    @property
    def pool_dim(self) -> int:
        """Return the numbers of a key, and of a value, in the KV pool. A latent's first half lies where keys do, its second half
        where values do: so its blocks are as large as it is, and move like any other."""
        return self.latent.width // 2 if self.latent else self.head_dim

    @property
    def suits_int8_kv(self) -> bool:
        """Return whether keys in int8, with one scale for each head of a token, are known to be harmless.

        The largest number of a key sets the scale of all. A bias that is added to keys, behind the projection or behind their
        norm, can make a few channels so large that little is left of the others. Reports: the biases of Qwen2.5-7B have norms of
        605 and 921 in its first and last layer, of 22 elsewhere (github.com/ggml-org/llama.cpp/issues/21385); Qwen2.5-Math-7B
        computes nonsense with KV in fp8, Qwen3, which has norms in place of biases, does not
        (github.com/verl-project/verl/pull/4435). Of latent attention, a scale is that of half a latent, which all heads read:
        not measured."""
        return self.latent is None and not self.qkv_bias and not self.qk_norm_bias

    def is_rotated(self, layer: int) -> bool:
        """Return whether this layer's queries and keys are rotated."""
        return not self.rotated or self.rotated[layer]

    def has_qk_norm(self, layer: int) -> bool:
        """Return whether this layer's queries and keys are normalized."""
        return bool(self.qk_norm) and (self.is_rotated(layer) or not self.qk_norm_rotated)

    def has_temperature(self, layer: int) -> bool:
        """Return whether this layer's queries grow with their position."""
        return self.temperature is not None and (self.temperature.of_rotated or not self.is_rotated(layer))

    def has_experts(self, layer: int) -> bool:
        """Return whether this layer's MLP is a mixture of experts."""
        return self.experts is not None and self.experts.layers[layer]

    def shortened(self, num_layers: int) -> ModelConfig:
        """Return a config of the first `num_layers` layers alone."""
        experts = self.experts and replace(self.experts, layers=self.experts.layers[:num_layers])
        return replace(
            self,
            num_layers=num_layers,
            windows=self.windows[:num_layers],
            rotated=self.rotated[:num_layers],
            experts=experts,
        )

    @property
    def layer_weights(self) -> int:
        """Return the weights that each token is multiplied with in a layer, the mean over layers; of experts, those chosen."""
        return self.weights.active // self.num_layers

    @property
    def weights(self) -> WeightCount:
        """Return the weights of all layers, without biases and norms: less than a thousandth."""
        if self.latent is None:
            attention = self.hidden_size * self.head_dim * 2 * (self.num_heads + self.num_kv_heads)
        else:
            attention = self._latent_weights(self.latent)
        column = (3 if self.gated_mlp else 2) * self.hidden_size  # of an MLP, for each of its inner columns
        experts = self.experts
        if experts is None:
            return WeightCount(self.num_layers * (attention + column * self.intermediate_size))
        mixed = sum(experts.layers)
        shared = column * experts.shared_intermediate_size + self.hidden_size * experts.num_experts  # and the router
        dense = (self.num_layers - mixed) * column * self.intermediate_size
        every_token = self.num_layers * attention + dense + mixed * shared
        return WeightCount(every_token, mixed * column * experts.intermediate_size, experts.num_experts, experts.top_k)

    @property
    def reaches(self) -> tuple[int, ...]:
        """Return, for each layer with a window, the most tokens that a token attends to; of chunks their mean."""
        return tuple((window + 1) // 2 if self.chunked else window for window in self.windows if window is not None)

    @property
    def attention_operations(self) -> int:
        """Return the operations of one token for each token that it attends to, in all layers: two for each number that a head
        multiplies, of a latent the whole of it for its score and the part without rotation for its values."""
        numbers = 2 * self.head_dim if self.latent is None else self.latent.width + self.latent.kv_rank
        return 2 * self.num_layers * self.num_heads * numbers

    def _latent_weights(self, latent: LatentConfig) -> int:
        query = self.num_heads * (latent.nope_dim + latent.rope_dim)
        queries = latent.query_rank * (self.hidden_size + query) if latent.query_rank else self.hidden_size * query
        expanded = latent.kv_rank * self.num_heads * (latent.nope_dim + latent.value_dim)
        return queries + self.hidden_size * latent.width + expanded + self.hidden_size * self.num_heads * latent.value_dim

    @property
    def parts(self) -> tuple[str, ...]:
        """Return the names of the parts that a Llama does not have, in a fixed order."""
        partial = self.rope.rotary_dim < (self.latent.rope_dim if self.latent else self.head_dim)
        present = {
            "LayerNorm": self.norm == "layer",
            "norms behind attention and MLP": self.post_norm,
            "no norms before attention and MLP": not self.pre_norm,
            "parallel attention and MLP": self.parallel,
            "QK norm with a weight for each head": self.qk_norm == "heads",
            "QK norm over all heads": self.qk_norm == "all",
            "bias of QK norm": self.qk_norm_bias,
            "QK norm behind the rotary embedding": bool(self.qk_norm) and self.qk_norm_rotated,
            "norm of embeddings": self.embedding_norm,
            "plain MLP": not self.gated_mlp,
            f"{self.activation} activation": self.activation != "silu",
            "experts": self.experts is not None,
            "two rotary embeddings": self.local_rope is not None,
            "partial rotary embedding": partial and not self.learned_positions,
            "layers without rotary embedding": bool(self.rotated) and not all(self.rotated),
            "learned positions": self.learned_positions > 0,
            "scaled attention": self.attention_scale not in (0.0, self.head_dim**-0.5) and not self.latent,
            "softcap of attention": self.attention_softcap > 0,
            "chunked attention": self.chunked,
            "temperature of queries": self.temperature is not None,
            "attention sinks": self.sinks,
            "latent attention": self.latent is not None,
            "multiplier of embeddings": self.embedding_multiplier != 1,
            "multiplier of residuals": self.residual_multiplier != 1,
            "multiplier of logits": self.logits_multiplier != 1,
            "softcap of logits": self.logits_softcap > 0,
            "bias of logits": self.head_bias,
        }
        return tuple(name for name, is_there in present.items() if is_there)


def missing_part(config: ModelConfig, computed: frozenset[str]) -> str | None:
    """Return the first part that is not among those a backend computes; None when it computes them all."""
    return next((part for part in config.parts if part not in computed), None)


def token_ids(value: object) -> frozenset[int]:
    """Return the ids of a config's `eos_token_id`: absent, one id or a list of ids."""
    if value is None:
        return frozenset()
    ids = value if isinstance(value, (list, tuple)) else [value]
    if not all(isinstance(item, int) and not isinstance(item, bool) for item in ids):
        raise ValueError(f"eos_token_id is {value!r}, not a token id or a list of them")
    return frozenset(ids)


# What families have in common when they read a config


@dataclass(frozen=True)
class Defaults:
    """What a family takes where its config.json says nothing."""

    head_dim: int | None = None  # None: hidden_size / num_attention_heads
    max_context: int | None = None  # None: it must be there
    norm_eps: float = 1e-6
    tie: bool = False
    activation: str = "silu"
    rope_theta: float = 10000.0
    partial_rotary: float = 1.0
    is_rotary: bool = True
    names: dict[str, str] = field(default_factory=dict)  # keys that this family spells in another way


def decoder(read: ConfigReader, defaults: Defaults | None = None, /, **parts: object) -> ModelConfig:
    """Return a Llama's config with the parts that differ. Raises UnsupportedModel or ValueError, naming the key."""
    defaults = defaults or Defaults()

    def key(name: str) -> str:
        return defaults.names.get(name, name)

    num_heads = read.count(key("num_attention_heads"))
    hidden_size = read.count(key("hidden_size"))
    head_dim = read.optional_count("head_dim") or defaults.head_dim or hidden_size // num_heads
    num_kv_heads = read.optional_count(key("num_key_value_heads")) or num_heads
    if num_heads % num_kv_heads:
        raise ValueError(f"num_attention_heads {num_heads} is not a multiple of num_key_value_heads {num_kv_heads}")
    num_layers = read.count(key("num_hidden_layers"))
    max_context = read.count(key("max_position_embeddings"), default=defaults.max_context)
    read.require("is_causal", True)
    common: dict[str, object] = {
        "model_type": str(read["model_type"]),
        "vocab_size": read.count("vocab_size"),
        "hidden_size": hidden_size,
        "num_layers": num_layers,
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "tie_word_embeddings": read.flag("tie_word_embeddings", defaults.tie),
        "qkv_bias": False,
        "output_bias": False,
        "mlp_bias": False,
        "windows": (None,) * num_layers,
        "eos_token_ids": token_ids(read.get("eos_token_id")),
        "dtype": _dtype(read),
    }
    if "intermediate_size" not in parts:
        common["intermediate_size"] = read.count(key("intermediate_size"))
    if "norm_eps" not in parts:
        common["norm_eps"] = read.above_zero(key("rms_norm_eps"), default=defaults.norm_eps)
    if "activation" not in parts:
        common["activation"] = activation(read, key("hidden_act"), defaults.activation)
    if "rope" not in parts:
        common["rope"] = (
            RopeConfig.from_dict(
                read, head_dim=head_dim, max_context=max_context, theta=defaults.rope_theta, partial=defaults.partial_rotary
            )
            if defaults.is_rotary
            else RopeConfig("default", defaults.rope_theta, 0, max_context, max_context)
        )
    if not defaults.is_rotary:
        common["rotated"] = (False,) * num_layers
    config = ModelConfig(**{**common, "max_context": max_context, **parts})  # type: ignore[arg-type]
    return replace(config, max_context=max(config.max_context, config.rope.context))


def activation(read: ConfigReader, key: str, default: str) -> str:
    """Return what is computed for the activation that the config names."""
    name = str(read.get(key) or default)
    if name not in ACTIVATIONS:
        raise UnsupportedModel(f"{key} {name!r} is not supported; this engine computes {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def layer_windows(read: ConfigReader, num_layers: int, window: int | None) -> tuple[int | None, ...] | None:
    """Return the windows that `layer_types` says; None where it is not there."""
    kinds = read.texts("layer_types")
    if kinds is None:
        return None
    if len(kinds) < num_layers:
        raise ValueError(f"layer_types: {len(kinds)} entries for {num_layers} layers")
    return tuple(_window_of(kind, window) for kind in kinds[:num_layers])


def _window_of(kind: str, window: int | None) -> int | None:
    if kind not in ("full_attention", "sliding_attention"):
        raise UnsupportedModel(f"layer_types: {kind!r} is not supported; layers are full_attention or sliding_attention")
    return window if kind == "sliding_attention" else None


def every(count: int, period: int, others: Sequence[int] = ()) -> tuple[bool, ...]:
    """Return for each of `count` layers whether it is the last of its `period`, and none of `others`."""
    return tuple((layer + 1) % period == 0 and layer not in others for layer in range(count))


def _dtype(read: ConfigReader) -> str | None:
    value = read.get("dtype") or read.get("torch_dtype")
    read.ignore("dtype", "torch_dtype")
    return None if value is None else str(value).removeprefix("torch.")
