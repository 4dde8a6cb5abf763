"""How fast a model can be on a device, from data sheets: operations over operations a second, bytes over bytes a second. Pure.

    weights     W bytes / bandwidth             read once a step, however many tokens it has
    products    2 · P · tokens / operations     at the same time: whichever takes longer, the other hides behind
    KV          bytes of a token · Σ contexts / bandwidth         of sequences that decode
    attention   4 · heads · head dim · layers · Σ contexts / operations         of prompt tokens
    all-reduce  two a layer, over the link between the devices that share a model (none with one device)
    overhead    what the engine does besides (`planning/prior.py`)

A step's time is the larger of the first two, and the others: a convex curve of the tokens in a step. The latency model is
linear, so it is made of chords: exact for a step with nothing in it, with a full chunk of prompts and with a full batch of
sequences; between these it lies above the curve, by less than the weights take; where both are full, a few percent below.

(S. Williams, A. Waterman, D. Patterson, "Roofline", CACM 52(4), 2009; R. Pope et al., "Efficiently Scaling Transformer
Inference", MLSys 2023, §3, for the parts and for tensor parallelism.)
"""

from dataclasses import dataclass

from pdmesh.planning.devices import Device
from pdmesh.planning.latency_model import LatencyModel
from pdmesh.planning.prior import OVERHEAD_PER_LAYER_S, OVERHEAD_PER_SEQUENCE_S, OVERHEAD_S
from pdmesh.planning.roofline_model import WEIGHT_BITS, Decoder

RESERVED_BYTES = 2**30
"""Of each device's memory, for its runtime and for activations."""
ALL_REDUCE_S = 1e-5
"""Of one all-reduce however small; two a layer. An assumption: some 10 µs are usual over NVLink."""
_ACTIVATION_BYTES = 2
_REDUCTIONS_PER_LAYER = 2


@dataclass(frozen=True)
class Roofline:
    """`weights`: the format that they are read in; `products`: the numbers of the products. `tensor_parallel` devices share each
    layer by its KV heads. Raises ValueError naming the field, DeviceError."""

    device: Device
    decoder: Decoder
    weights: str = "bfloat16"
    products: str = "bfloat16"
    kv_dtype: str = "bfloat16"
    tensor_parallel: int = 1

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
        """That are reached, of all devices together."""
        return self.device.operations_in(self.products) * self.device.compute_share * self.tensor_parallel

    @property
    def bytes_per_s(self) -> float:
        """That are reached, of all devices together."""
        return self.device.bytes_per_s * self.device.memory_share * self.tensor_parallel

    @property
    def read_s(self) -> float:
        """Reading all weights once: no step is shorter."""
        num_read = self.decoder.num_weights + self.decoder.num_head_weights
        return num_read * WEIGHT_BITS[self.weights] / 8 / self.bytes_per_s

    @property
    def token_s(self) -> float:
        """The products of one token, the head's not counted."""
        return 2 * self.decoder.num_weights / self.operations_per_s

    @property
    def row_s(self) -> float:
        """The products of a sequence that decodes: a token, and a row of logits."""
        return self.token_s + 2 * self.decoder.num_head_weights / self.operations_per_s

    @property
    def context_s(self) -> float:
        """Of a token that decodes, for each token that it attends to: its keys and values are read."""
        return self.decoder.kv_bytes_per_token(self.kv_dtype) / self.bytes_per_s

    @property
    def attention_s(self) -> float:
        """Of a prompt token, for each token that it attends to: the tokens of a chunk share what is read."""
        return self.decoder.attention_operations / self.operations_per_s

    @property
    def overhead_s(self) -> float:
        """Of each step, whatever it holds."""
        reductions = _REDUCTIONS_PER_LAYER * ALL_REDUCE_S if self.tensor_parallel > 1 else 0.0
        return OVERHEAD_S + (OVERHEAD_PER_LAYER_S + reductions) * self.decoder.num_layers

    @property
    def reduce_s(self) -> float:
        """Of each token: a ring sends 2 · (n - 1) / n of it, twice a layer."""
        if self.tensor_parallel == 1:
            return 0.0
        sent = 2 * (self.tensor_parallel - 1) / self.tensor_parallel * self.decoder.hidden_size * _ACTIVATION_BYTES
        return _REDUCTIONS_PER_LAYER * self.decoder.num_layers * sent / (self.device.link_bytes_per_s * self.device.link_share)

    def prefill_parts(self, num_tokens: int) -> dict[str, float]:
        """Seconds of a step that computes a whole prompt, by what takes them."""
        products_s, context = num_tokens * self.token_s, num_tokens * (num_tokens + 1) / 2
        return self._parts(products_s, {"attention": context * self.attention_s}, num_tokens, 0)

    def decode_parts(self, batch: float, context: float) -> dict[str, float]:
        """Seconds of a step in which `batch` sequences of `context` tokens get one more, by what takes them."""
        return self._parts(batch * self.row_s, {"reading KV": batch * context * self.context_s}, batch, batch)

    def held_bytes(self) -> float:
        """Weights, on all devices together."""
        return self.decoder.num_parameters * WEIGHT_BITS[self.weights] / 8

    def kv_tokens(self, share: float) -> int:
        """That have room in this share of the memory that weights leave; 0: not even the weights fit."""
        free = (self.device.memory_bytes - RESERVED_BYTES) * self.tensor_parallel - self.held_bytes()
        return max(0, int(free * share / self.decoder.kv_bytes_per_token(self.kv_dtype)))

    def latency(self, chunk: int, batch: int) -> LatencyModel:
        """With steps of at most `chunk` tokens and `batch` sequences."""
        return LatencyModel(
            fixed_s=self.read_s + self.overhead_s,
            per_prefill_token_s=self._chord_s(chunk, self.token_s) + self.reduce_s,
            per_prefill_context_s=self.attention_s,
            per_sequence_s=self._chord_s(batch, self.row_s) + self.reduce_s + OVERHEAD_PER_SEQUENCE_S,
            per_context_token_s=self.context_s,
        )

    def _chord_s(self, most: int, each_s: float) -> float:
        """Of each of `most`, beyond reading the weights."""
        return max(0.0, most * each_s - self.read_s) / most

    def _parts(self, products_s: float, attention: dict[str, float], num_tokens: float, num_rows: float) -> dict[str, float]:
        longest = "products" if products_s > self.read_s else "reading weights"
        reduce_s = self.reduce_s * num_tokens
        overhead_s = self.overhead_s + OVERHEAD_PER_SEQUENCE_S * num_rows
        return {longest: max(products_s, self.read_s), **attention, "all-reduce": reduce_s, "overhead": overhead_s}
