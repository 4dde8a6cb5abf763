"""A mixture of experts on the kernels beside the reference: routing, products in every format, and what the device counts."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from pdmesh.engine.kernels.triton.experts.experts import GroupedExperts
from pdmesh.engine.kernels.triton.experts.routing import Routed, routed
from pdmesh.engine.kernels.triton.experts.weights import ExpertStack
from pdmesh.engine.kernels.triton.linear.linear import make_triton_linear
from pdmesh.engine.loader.quantize import (
    dequantize_fp8,
    dequantize_int4,
    dequantize_int8,
    quantize_fp8,
    quantize_int4,
    quantize_int8,
)
from pdmesh.engine.models.config import ExpertsConfig
from pdmesh.engine.models.experts import ClampedMLP, Experts, route
from pdmesh.engine.models.layers import MLP, DenseLinear, GatedMLP, Linear
from tests.engine.kernels.triton.frozen import Frozen
from tests.engine.kernels.triton.paged import DEVICE

HIDDEN, INNER = 72, 96
FORMATS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "int8": (quantize_int8, dequantize_int8),
    "int4": (lambda weight: quantize_int4(weight, 32), dequantize_int4),
    "fp8": (quantize_fp8, dequantize_fp8),
}


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def config_of(**changed: Any) -> ExpertsConfig:
    return ExpertsConfig(**{"num_experts": 6, "top_k": 2, "intermediate_size": INNER, "layers": (True,), **changed})


def route_on_device(config: ExpertsConfig, x: Tensor, router: Tensor, slots: list[int], **more: Any) -> tuple[Routed, Tensor]:
    counts = torch.zeros(config.num_experts, dtype=torch.int64, device=DEVICE)
    bias, correction = more.get("bias"), more.get("correction")
    return routed(config, x, torch.tensor(slots, dtype=torch.int32, device=DEVICE), router, bias, correction, counts), counts


@pytest.mark.parametrize(
    "changed",
    [
        {"scoring": "softmax"},
        {"scoring": "softmax", "normalize": True, "scale": 2.5, "top_k": 5, "num_experts": 7},
        {"scoring": "softmax_topk", "top_k": 3},
        {"scoring": "sigmoid", "normalize": True, "has_correction": True, "scale": 0.5},
        {"scoring": "sigmoid", "num_experts": 12, "num_groups": 4, "top_groups": 2, "has_correction": True, "group_rank": "top2"},
        {"scoring": "softmax", "num_experts": 12, "num_groups": 3, "top_groups": 1, "top_k": 3},
        {"scoring": "sparsemixer", "router_jitter": 0.2},
    ],
    ids=str,
)
def test_the_experts_of_each_token_are_the_references(changed: dict[str, Any]) -> None:
    config = config_of(**changed)
    x, router, bias = random(12, 200), random(config.num_experts, 200, seed=1), random(config.num_experts, seed=2)
    correction = random(config.num_experts, seed=3) if config.has_correction else None
    found, _ = route_on_device(config, x, router, list(range(12)), bias=bias, correction=correction)
    logits = x @ router.t() + bias
    torch.testing.assert_close(found.logits, logits, atol=1e-4, rtol=0)
    scores, chosen = route(config, logits, correction)
    dense, own = torch.zeros(2, 12, config.num_experts, device=DEVICE)
    torch.testing.assert_close(
        own.scatter(1, found.chosen.long(), found.scores), dense.scatter(1, chosen, scores), atol=2e-5, rtol=1e-4
    )


def test_places_lie_by_expert_and_padding_nowhere() -> None:
    """More places than a program of the sort reads at a time."""
    config, num_tokens = config_of(num_experts=5), 700
    slots = [-1 if token % 3 == 1 else token for token in range(num_tokens)]
    found, counts = route_on_device(config, random(num_tokens, 8), random(5, 8, seed=1), slots)
    chosen, starts = found.chosen.flatten(), found.starts.tolist()
    assert chosen.view(-1, 2)[1::3].tolist() == [[5, 5]] * len(slots[1::3])
    expected = [torch.where(chosen == expert)[0].tolist() for expert in range(5)]
    assert [found.order[a:b].tolist() for a, b in pairwise(starts)] == expected
    assert counts.tolist() == [len(places) for places in expected]
    assert (starts[0], starts[-1]) == (0, sum(map(len, expected)))


def test_equal_scores_take_the_lower_number_and_no_number_takes_an_expert() -> None:
    config = config_of(num_experts=4)
    x = torch.ones(4, 8, device=DEVICE)
    x[2] = float("nan")
    found, counts = route_on_device(config, x, torch.ones(4, 8, device=DEVICE), [0, 1, 2, 3])
    assert found.chosen[[0, 1, 3]].tolist() == [[0, 1]] * 3
    assert bool((found.chosen < 4).all()) and bool(found.scores[2].isnan().all())
    assert counts.sum() == 8


class Subject:
    """The same mixture twice: the reference, and on the kernels with weights in a format."""

    def __init__(
        self, config: ExpertsConfig, form: str = "none", dtype: torch.dtype = torch.float32, hidden: int = HIDDEN
    ) -> None:
        self.config, self.form, self.dtype, self.hidden = config, form, dtype, hidden
        self._seed = 10
        pairs = [self._expert() for _ in range(config.num_experts)]
        around: dict[str, Any] = {
            "router": self._random(config.num_experts, hidden).float(),
            "router_bias": self._random(config.num_experts).float() if config.router_bias else None,
            "correction": None,
            "shared_gate": self._random(1, hidden).float() if config.shared_gate else None,
        }
        shared: tuple[MLP | None, MLP | None] = (None, None)
        if config.shared_intermediate_size:
            shared = self._mlp(config.shared_intermediate_size, bias=False)
        self.reference = Experts(config, experts=[one for one, _ in pairs], shared=shared[0], **around)
        self.grouped = GroupedExperts(config, "silu", experts=(other for _, other in pairs), shared=shared[1], **around)

    def _random(self, *shape: int) -> Tensor:
        self._seed += 1
        return random(*shape, seed=self._seed, dtype=self.dtype)

    def _linear(self, rows: int, width: int, *, bias: bool) -> tuple[Linear, Linear]:
        weight, own = self._random(rows, width) * width**-0.5, self._random(rows) if bias else None
        if self.form == "none":
            return DenseLinear(weight, own), DenseLinear(weight, own)
        quantize, dequantize = FORMATS[self.form]
        packed = quantize(weight.float())
        return DenseLinear(dequantize(packed).to(self.dtype), own), make_triton_linear(packed, own)

    def _mlp(self, inner: int, *, bias: bool) -> tuple[MLP, MLP]:
        maps = (self._linear(2 * inner, self.hidden, bias=bias), self._linear(self.hidden, inner, bias=bias))
        one, other = (GatedMLP(gate_up, down) for gate_up, down in zip(*maps, strict=True))
        return one, other

    def _expert(self) -> tuple[MLP, MLP]:
        one, other = self._mlp(self.config.intermediate_size, bias=self.config.bias)
        if self.config.activation != "swiglu_oai":
            return one, other
        assert isinstance(one, GatedMLP) and isinstance(other, GatedMLP)
        limit = self.config.activation_limit
        return ClampedMLP(one.gate_up, one.down, limit), ClampedMLP(other.gate_up, other.down, limit)


def check(subject: Subject, num_tokens: int, tolerance: float) -> None:
    x = random(num_tokens, subject.hidden, dtype=subject.dtype)
    expected, found = subject.reference(x), subject.grouped(x)
    assert found.dtype == x.dtype
    torch.testing.assert_close(found, expected, atol=tolerance * float(expected.abs().max()), rtol=0)
    assert subject.grouped.counts.tolist() == subject.reference.counts.tolist()


MIXTURES: dict[str, dict[str, Any]] = {
    "mixtral": {"normalize": True},
    "qwen2_moe": {"shared_intermediate_size": 64, "shared_gate": True, "top_k": 3},
    "deepseek": {"shared_intermediate_size": 32, "scoring": "sigmoid", "scale": 2.0},
    "gpt_oss": {
        "scoring": "softmax_topk", "bias": True, "router_bias": True, "activation": "swiglu_oai", "activation_limit": 0.6,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", MIXTURES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.float16, 3e-3)], ids=str)
def test_plain_weights(name: str, dtype: torch.dtype, tolerance: float) -> None:
    check(Subject(config_of(**MIXTURES[name]), dtype=dtype), 20, tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("form", FORMATS)
def test_weights_in_words(form: str, dtype: torch.dtype) -> None:
    """Gate and up of 40 rows each: words of up begin with a row tile of their own."""
    inner = 32 if form == "int4" else 40
    subject = Subject(config_of(intermediate_size=inner, bias=True), form, dtype, hidden=64)
    check(subject, 9, 2e-6 if dtype == torch.float32 else 4e-3)


def test_wider_tiles_of_many_tokens() -> None:
    check(Subject(config_of(num_experts=3, intermediate_size=16), dtype=torch.float16), 132, 3e-3)


def test_a_token_has_the_same_bits_in_every_batch() -> None:
    subject, x = Subject(config_of(**MIXTURES["qwen2_moe"]), dtype=torch.float16), random(24, HIDDEN, dtype=torch.float16)
    whole = subject.grouped(x)
    order = torch.randperm(24, generator=torch.Generator().manual_seed(1))
    assert torch.equal(subject.grouped(x[order]), whole[order])
    assert torch.equal(subject.grouped(x[4:8]), whole[4:8])


@pytest.mark.skipif(DEVICE == "cuda", reason="there are real graphs")
def test_a_recording_serves_every_routing() -> None:
    """Tokens that all take other experts than when it was recorded, and padding."""
    subject = Subject(config_of(**MIXTURES["mixtral"]))
    x, slots = torch.zeros(8, HIDDEN), torch.full((8,), -1, dtype=torch.int32)
    with torch.inference_mode():
        recording = Frozen().record(lambda: (subject.grouped(x, slots),))
        assert subject.grouped.counts.sum() == 0
        for seed in (1, 2):
            x.copy_(random(8, HIDDEN, seed=seed))
            slots.copy_(torch.arange(8) - 2)
            before = subject.reference.counts.clone()
            recording.replay()
            expected = subject.reference(x[2:])
            torch.testing.assert_close(recording.output[0][2:], expected, atol=1e-5, rtol=1e-5)
            assert not recording.output[0].isnan().any()
            assert bool((subject.reference.counts != before).any())
        assert subject.grouped.counts.tolist() == subject.reference.counts.tolist()


def test_experts_that_differ_are_named() -> None:
    stack = ExpertStack(2, 1)
    stack.put(0, DenseLinear(torch.zeros(4, 4), None))
    with pytest.raises(ValueError, match="expert 1"):
        stack.put(1, DenseLinear(torch.zeros(4, 5), None))
    with pytest.raises(TypeError, match="no map of an expert"):
        stack.put(1, lambda x: x)  # type: ignore[arg-type]
