"""Predicts a model's speed on a device from data sheets: operations over operations a second, bytes over bytes a second. Pure.

    weights     W bytes / bandwidth             read once a step, however many tokens it has; of experts, those that they choose
    products    2 · P · tokens / operations     at the same time: the longer of the two hides the other
    KV          bytes of a token · Σ contexts / bandwidth         of sequences that decode; with a window, what it reaches
    attention   4 · heads · head dim · layers · Σ contexts / operations         of prompt tokens
    all-reduce  two a layer, over the link between the devices that share a model (none with one device)
    overhead    the engine's other work (`pdmesh/planning/latency_model.py`)

A step's time is the larger of the first two, and the others: a convex curve of the tokens in a step. The latency model is linear,
so it is made of chords: exact for an empty step, a full chunk of prompts and a full batch of sequences; between these it lies
above the curve, by less than the weights take; where both are full, a few percent below. Reading of experts is a curve the other
way round: the chord goes through half a batch and a full one, and lies above the curve for smaller batches. With sliding windows
attention grows more slowly beyond them: its line goes through `context`, below the curve for shorter ones.

(S. Williams, A. Waterman, D. Patterson, "Roofline", CACM 52(4), 2009; R. Pope et al., "Efficiently Scaling Transformer
Inference", MLSys 2023, §3, for the parts and for tensor parallelism.)
"""

from dataclasses import dataclass

from pdmesh.planning.devices import Device
from pdmesh.planning.latency_model import (
    OVERHEAD_PER_LAYER_S,
    OVERHEAD_PER_SEQUENCE_S,
    OVERHEAD_S,
    USUAL_CONTEXT,
    LatencyModel,
    attended_share,
    distinct_experts,
)

# A decoder's costs: weights, KV, products; `pdmesh/planner/shapes.py` takes the shapes from a config.json. Biases and norms are
# less than a thousandth and are left out.


WEIGHT_BITS = {"float32": 32.0, "bfloat16": 16.0, "float16": 16.0, "int8": 8.0, "fp8": 8.0, "int4": 5.0}
"""Bits of a weight as it is read; int4 with a scale and a minimum in float16 for each 32."""
KV_BITS = {"float32": 32, "bfloat16": 16, "float16": 16, "int8": 8, "fp8": 8}
_SCALE_BYTES = 4
"""Bytes for each head of a token, of KV in int8."""


@dataclass(frozen=True)
class ExpertShape:
    """Hold the shapes of a mixture of experts. `num_weights`: of one expert, in all layers that have experts."""

    num_experts: int
    top_k: int
    num_weights: int


@dataclass(frozen=True)
class Decoder:
    """Hold the shapes of a decoder. `max_context` in tokens. The last seven are for those that are no Llama; 0: as a Llama
    has it. `shared_weights`: all that every token is multiplied with, the head's not counted. `suits_int8_kv`: the CPU
    kernels keep its KV in int8 by default (ModelConfig)."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_context: int
    tied_embeddings: bool = False
    shared_weights: int = 0
    experts: ExpertShape | None = None
    pool_heads: int = 0  # heads of a token in the KV pool
    pool_dim: int = 0  # numbers of a key, and of a value, there
    pair_operations: int = 0  # of one token for each token that it attends to, in all layers
    reaches: tuple[int, ...] = ()  # for each layer with a sliding window, the most tokens that a token attends to
    suits_int8_kv: bool = True

    @property
    def num_shared_weights(self) -> int:
        """Return the weights that every token is multiplied with, the head's not counted."""
        attention = self.hidden_size * self.head_dim * 2 * (self.num_heads + self.num_kv_heads)
        return self.shared_weights or self.num_layers * (attention + 3 * self.hidden_size * self.intermediate_size)

    @property
    def num_weights(self) -> int:
        """Return the weights that each token is multiplied with, the head's not counted."""
        return self.num_shared_weights + (self.experts.top_k * self.experts.num_weights if self.experts else 0)

    def num_weights_read(self, num_tokens: float) -> float:
        """Return the weights that a step of so many tokens reads, the head's not counted."""
        experts = self.experts
        if experts is None:
            return self.num_shared_weights
        return self.num_shared_weights + experts.num_weights * distinct_experts(experts.num_experts, experts.top_k, num_tokens)

    @property
    def num_head_weights(self) -> int:
        """Return the weights that each row of logits is multiplied with."""
        return self.vocab_size * self.hidden_size

    @property
    def num_parameters(self) -> int:
        """Return all parameters that must be in memory."""
        experts = self.experts.num_experts * self.experts.num_weights if self.experts else 0
        return self.num_shared_weights + experts + self.num_head_weights * (1 if self.tied_embeddings else 2)

    @property
    def num_active_parameters(self) -> int:
        """Return those without the experts that a token does not take: the second number in the names of such models."""
        experts = self.experts
        idle = (experts.num_experts - experts.top_k) * experts.num_weights if experts else 0
        return self.num_parameters - idle

    @property
    def attention_operations(self) -> int:
        """Return the operations of one token for each token that it attends to."""
        return self.pair_operations or 4 * self.num_layers * self.num_heads * self.head_dim

    def attended(self, context: float) -> float:
        """Return the tokens of its context that a token attends to, the mean over layers."""
        return context * attended_share(self.reaches, self.num_layers, context)

    def attended_by_prompt(self, num_tokens: int) -> float:
        """Return the sum of `attended` over the tokens of a prompt."""
        whole = num_tokens * (num_tokens + 1) / 2
        hidden = (max(0, num_tokens - reach) for reach in self.reaches)  # 1 + 2 + .. + hidden tokens are out of reach
        return whole - sum(num * (num + 1) / 2 for num in hidden) / self.num_layers

    def kv_bytes_per_token(self, kv_dtype: str) -> int:
        """Return the bytes of keys and values in all layers. The pool keeps them whatever the windows."""
        scales = _SCALE_BYTES if kv_dtype == "int8" else 0
        heads, dim = self.pool_heads or self.num_kv_heads, self.pool_dim or self.head_dim
        return 2 * self.num_layers * heads * (dim * KV_BITS[kv_dtype] // 8 + scales)


RESERVED_BYTES = 2**30
"""Reserved of each device's memory, for its runtime and for activations."""
ALL_REDUCE_S = 1e-5
"""Latency of one all-reduce, however small; two a layer. An assumption: some 10 µs are usual over NVLink."""
_ACTIVATION_BYTES = 2
_REDUCTIONS_PER_LAYER = 2


@dataclass(frozen=True)
class Roofline:
    """Combine model and device. `weights`: the format that they are read in; `products`: the number format of the products.
    `tensor_parallel` devices share each layer by its KV heads. `context`: for tokens of this one the latency model is exact where
    the decoder has sliding windows. Raises ValueError naming the field, DeviceError."""

    device: Device
    decoder: Decoder
    weights: str = "bfloat16"
    products: str = "bfloat16"
    kv_dtype: str = "bfloat16"
    tensor_parallel: int = 1
    context: float = USUAL_CONTEXT

    def __post_init__(self) -> None:
        heads, degree = self.decoder.num_kv_heads, self.tensor_parallel
        if degree < 1 or heads % degree:
            fitting = ", ".join(str(number) for number in range(1, heads + 1) if heads % number == 0)
            raise ValueError(f"tensor_parallel: {degree} does not divide the model's {heads} KV heads; give one of {fitting}")
        if degree > 1 and not self.device.link_bytes_per_s:
            raise ValueError(f"tensor_parallel: {self.device.name} has no link to others of its kind; give 1")
        self.device.operations_in(self.products)

    @property
    def operations_per_s(self) -> float:
        """Return the operations a second that are reached, of all devices together."""
        return self.device.operations_in(self.products) * self.device.compute_share * self.tensor_parallel

    @property
    def bytes_per_s(self) -> float:
        """Return the bytes a second that are reached, of all devices together."""
        return self.device.bytes_per_s * self.device.memory_share * self.tensor_parallel

    @property
    def read_s(self) -> float:
        """Return the time to read the weights of one token once: no step is shorter."""
        return self.step_read_s(1)

    def step_read_s(self, num_tokens: float) -> float:
        """Return the time to read the weights that a step of so many tokens needs."""
        num_read = self.decoder.num_weights_read(num_tokens) + self.decoder.num_head_weights
        return num_read * WEIGHT_BITS[self.weights] / 8 / self.bytes_per_s

    @property
    def token_s(self) -> float:
        """Return the time of the products of one token, the head's not counted."""
        return 2 * self.decoder.num_weights / self.operations_per_s

    @property
    def row_s(self) -> float:
        """Return the time of the products of a sequence that decodes: a token, and a row of logits."""
        return self.token_s + 2 * self.decoder.num_head_weights / self.operations_per_s

    @property
    def context_s(self) -> float:
        """Return the time of a decoding token for each token that it attends to: its keys and values are read."""
        return self.decoder.kv_bytes_per_token(self.kv_dtype) / self.bytes_per_s

    @property
    def attention_s(self) -> float:
        """Return the time of a prompt token for each token that it attends to: the tokens of a chunk share what is read."""
        return self.decoder.attention_operations / self.operations_per_s

    @property
    def overhead_s(self) -> float:
        """Return the fixed time of each step."""
        reductions = _REDUCTIONS_PER_LAYER * ALL_REDUCE_S if self.tensor_parallel > 1 else 0.0
        return OVERHEAD_S + (OVERHEAD_PER_LAYER_S + reductions) * self.decoder.num_layers

    @property
    def reduce_s(self) -> float:
        """Return the all-reduce time of each token: a ring sends 2 · (n - 1) / n of it, twice a layer."""
        if self.tensor_parallel == 1:
            return 0.0
        sent = 2 * (self.tensor_parallel - 1) / self.tensor_parallel * self.decoder.hidden_size * _ACTIVATION_BYTES
        return _REDUCTIONS_PER_LAYER * self.decoder.num_layers * sent / (self.device.link_bytes_per_s * self.device.link_share)

    def prefill_parts(self, num_tokens: int) -> dict[str, float]:
        """Return the seconds of a step that computes a whole prompt, by part."""
        attended = self.decoder.attended_by_prompt(num_tokens)
        return self._parts(num_tokens * self.token_s, {"attention": attended * self.attention_s}, num_tokens, 0)

    def decode_parts(self, batch: float, context: float) -> dict[str, float]:
        """Return the seconds of a step in which `batch` sequences of `context` tokens get one more, by part."""
        return self._parts(
            batch * self.row_s, {"reading KV": batch * self.decoder.attended(context) * self.context_s}, batch, batch
        )

    def held_bytes(self) -> float:
        """Return the bytes of the weights, on all devices together."""
        return self.decoder.num_parameters * WEIGHT_BITS[self.weights] / 8

    def kv_tokens(self, share: float) -> int:
        """Return the KV tokens that fit in this share of the memory left by the weights; 0: not even the weights fit."""
        free = (self.device.memory_bytes - RESERVED_BYTES) * self.tensor_parallel - self.held_bytes()
        return max(0, int(free * share / self.decoder.kv_bytes_per_token(self.kv_dtype)))

    def latency(self, chunk: int, batch: int) -> LatencyModel:
        """Return the latency model for steps of at most `chunk` tokens and `batch` sequences."""
        base_s = 2 * self.step_read_s(batch / 2) - self.step_read_s(batch)
        context = min(self.context, self.decoder.max_context)
        share = self.decoder.attended(context) / context
        return LatencyModel(
            fixed_s=base_s + self.overhead_s,
            per_prefill_token_s=self._chord_s(chunk, self.token_s, base_s) + self.reduce_s,
            per_prefill_context_s=share * self.attention_s,
            per_sequence_s=self._chord_s(batch, self.row_s, base_s) + self.reduce_s + OVERHEAD_PER_SEQUENCE_S,
            per_context_token_s=share * self.context_s,
        )

    def _chord_s(self, most: int, each_s: float, base_s: float) -> float:
        """Return the time of each of `most`, beyond what every step takes."""
        return (max(most * each_s, self.step_read_s(most)) - base_s) / most

    def _parts(self, products_s: float, attention: dict[str, float], num_tokens: float, num_rows: float) -> dict[str, float]:
        read_s = self.step_read_s(num_tokens)
        longest = "products" if products_s > read_s else "reading weights"
        reduce_s = self.reduce_s * num_tokens
        overhead_s = self.overhead_s + OVERHEAD_PER_SEQUENCE_S * num_rows
        return {longest: max(products_s, read_s), **attention, "all-reduce": reduce_s, "overhead": overhead_s}
