"""A KV pool in fp8: what it computes, how far that is from wide keys and values, and that nothing else of an engine minds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from pdmesh.engine.attention.base import AttentionPlan, ReferenceAttention
from pdmesh.engine.config import EngineConfig
from pdmesh.engine.engine import Engine
from pdmesh.engine.kernels.triton.cuda_graphs import DecodeSizes
from pdmesh.engine.kernels.triton.kv import store_kv
from pdmesh.engine.kernels.triton.model import TritonModel
from pdmesh.engine.kernels.triton.split_kv import Splits
from pdmesh.engine.loader.kv_scales import KVScales
from pdmesh.engine.loader.loader import LoadedModel, load_model
from pdmesh.engine.models.decoder import DecoderModel
from pdmesh.engine.request import EngineRequest
from pdmesh.engine.runner.batch import StepBatch
from pdmesh.engine.speculation.draft import Draft
from pdmesh.sampling_params import SamplingParams
from tests.engine.kernels.triton.paged import DEVICE
from tests.engine.kernels.triton.recorders import Counted
from tests.engine.kernels.triton.test_model import answers, prompt
from tests.engine.paged_loop import Chunk, PagedLoop, load
from tests.engine.trees import TreeStep, verify
from tests.support.mock_engine import hash_block, open_engine, run_to_end
from tests.support.tiny_models import make_tiny_model

FP8 = torch.float8_e4m3fn
SCALES: KVScales = ((0.25, 0.5), (0.046875, 0.125))


def with_scales(folder: Path) -> Path:
    """A checkpoint that brings scales of two layers."""
    tensors = load_file(folder / "model.safetensors")
    for layer, scales in enumerate(SCALES):
        for name, scale in zip(("k_scale", "v_scale"), scales, strict=True):
            tensors[f"model.layers.{layer}.self_attn.{name}"] = torch.tensor(scale)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def scaled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_scales(make_tiny_model(tmp_path_factory.mktemp("scaled")))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("plain"), "llama", num_hidden_layers=1)


def config_of(folder: Path, **settings: object) -> EngineConfig:
    sizes = {"num_blocks": 32, "max_context": 128, "max_num_seqs": 8, "device": DEVICE, "dtype": "float32"}
    fp8 = {"backend": "triton", "kv_dtype": "fp8", "speculation": "none"}
    return EngineConfig(model=str(folder), **{**sizes, **fp8, **settings})  # type: ignore[arg-type]


def triton_of(loaded: LoadedModel) -> TritonModel:
    assert isinstance(loaded.model, TritonModel)
    return loaded.model


@dataclass
class RoundedAttention:
    """The reference, on keys and values that torch has rounded to fp8."""

    inner: ReferenceAttention
    scales: KVScales
    name: str = "rounded"

    def plan(self, batch: StepBatch, block_size: int) -> AttentionPlan:
        return _RoundedPlan(self.inner.plan(batch, block_size), self.scales)


@dataclass
class _RoundedPlan:
    inner: AttentionPlan
    scales: KVScales

    def run(self, layer: int, query: Tensor, key: Tensor, value: Tensor, kv: Tensor) -> Tensor:
        rounded = [(x / s).clamp(-448, 448).to(FP8).float() * s for x, s in zip((key, value), self.scales[layer], strict=True)]
        return self.inner.run(layer, query, rounded[0], rounded[1], kv)


@pytest.mark.parametrize("is_scaled", [False, True])
def test_logits_are_those_of_the_reference_on_rounded_keys_and_values(is_scaled: bool, tmp_path: Path) -> None:
    """Chunks, a drafted tree and a decode step, with the checkpoint's scales or without."""
    folder, draft = make_tiny_model(tmp_path), Draft((11, 12, 13, 14), (-1, 0, 0, -1), (1.0,) * 4)
    if is_scaled:
        with_scales(folder)
    narrow, wide = load_model(config_of(folder)), load(folder, backend="torch", device=DEVICE, dtype="float32")
    assert narrow.kv_scales == (SCALES if is_scaled else ((1.0, 1.0),) * 2)
    assert isinstance(wide.model, DecoderModel)
    wide.model.attention = RoundedAttention(ReferenceAttention(wide.config, DEVICE), narrow.kv_scales)
    rows = []
    for loaded in (wide, narrow):
        loop = PagedLoop(loaded, num_blocks=32)
        table = loop.table(80)
        steps = [(0, prompt(40)), (40, prompt(16, 1)), (56, [5])]
        chunks = [loop.step([Chunk(table, tokens, first, every_row=True)]).clone() for first, tokens in steps]
        [tree] = verify(loop, [TreeStep(table, [7], 57, draft)])
        rows.append(torch.cat((*chunks, tree)))
    torch.testing.assert_close(rows[1], rows[0], atol=5e-4, rtol=0)


# ---- how far from wide keys and values


@dataclass
class Watched:
    """The reference's attention: keeps the heads of its one layer, and adds `change` to what they attend to."""

    inner: ReferenceAttention
    heads: list[Tensor] = field(default_factory=list)
    change: Tensor | float = 0.0
    name: str = "watched"

    def plan(self, batch: StepBatch, block_size: int) -> AttentionPlan:
        self._plan = self.inner.plan(batch, block_size)
        return self

    def run(self, layer: int, query: Tensor, key: Tensor, value: Tensor, kv: Tensor) -> Tensor:
        self.heads = [query, key, value]
        return self._plan.run(layer, query, key, value, kv) + self.change


def rounding(x: Tensor) -> Tensor:
    """The most by which e4m3 is off: 4 bits of a number, and half a step of 2^-9 below its normal ones."""
    return torch.maximum(2.0**-4 * x.abs(), torch.tensor(2.0**-10))


def attended_bound(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """[T, H, D] float64, of one sequence. A score is off by at most delta = scale * sum |q| e(k); a weight, which is a share of
    exponentials, by a factor of exp(+-2 delta). So the result is off by at most

        (exp(2 delta) - 1) sum w |v|  +  exp(2 delta) sum w e(v)
    """
    num_tokens, group = len(query), query.shape[1] // key.shape[1]
    query, key, value = query.double(), *(x.double().repeat_interleave(group, 1) for x in (key, value))
    hidden = torch.ones(num_tokens, num_tokens, dtype=torch.bool).triu(1)
    scale = query.shape[2] ** -0.5
    weights = (torch.einsum("qhd,khd->hqk", query, key) * scale).masked_fill(hidden, float("-inf")).softmax(-1)
    off = (torch.einsum("qhd,khd->hqk", query.abs(), rounding(key)) * scale).masked_fill(hidden, 0).amax(-1)
    factor = torch.exp(2 * off).T[:, :, None]
    sizes, errors = (torch.einsum("hqk,khd->qhd", weights, x) for x in (value.abs(), rounding(value)))
    return (factor - 1) * sizes + factor * errors


def slopes(loop: PagedLoop, watched: Watched, chunk: Chunk) -> Iterator[tuple[tuple[int, int], Tensor]]:
    """Of each token's logits along each of the numbers that it has attended to: nothing behind mixes tokens."""
    _, num_heads, dim = watched.heads[0].shape
    before = loop.step([chunk]).double()
    for head, column in product(range(num_heads), range(dim)):
        watched.change = torch.zeros(num_heads, dim)
        watched.change[head, column] = 1e-2
        yield (head, column), (loop.step([chunk]).double() - before) / 1e-2
    watched.change = 0.0


@pytest.mark.skipif(DEVICE == "cuda", reason="the bound is taken on the CPU")
def test_logits_are_within_the_bound_of_e4m3(tmp_path: Path) -> None:
    """To first order: each logit for the worst case of all keys and values at once; all of them, of errors that do not conspire;
    and together they are off by less than one rounding."""
    folder = make_tiny_model(tmp_path, num_hidden_layers=1, initializer_range=0.07)
    wide = load(folder, backend="torch", device=DEVICE, dtype="float32")
    assert isinstance(wide.model, DecoderModel)
    wide.model.attention = watched = Watched(ReferenceAttention(wide.config, DEVICE))
    loop, narrow = PagedLoop(wide, num_blocks=16), PagedLoop(load_model(config_of(folder)), num_blocks=16)
    chunk = Chunk(loop.table(40), prompt(40), 0, every_row=True)
    exact = loop.step([chunk]).double()
    off = attended_bound(*watched.heads)
    shares = torch.stack([slope.abs() * off[:, h, d, None] for (h, d), slope in slopes(loop, watched, chunk)])
    error = (narrow.step([replace(chunk, table=narrow.table(40))]).double() - exact).abs()
    assert bool((error <= shares.sum(0)).all())
    assert rms(error) < rms(shares.square().sum(0).sqrt()) < rms(exact)
    assert 2.0**-9 < rms(error) / rms(exact) < 2.0**-4


def rms(x: Tensor) -> float:
    return float(x.square().mean().sqrt())


def test_what_is_too_large_is_the_largest_number() -> None:
    kv = torch.zeros((2, 1, 16, 1, 16), dtype=FP8, device=DEVICE)
    key = torch.tensor([1e9, -1e9, float("inf"), -float("inf"), 460.0, 449.0, -500.0, 448.0] * 2, device=DEVICE).view(1, 1, 16)
    store_kv(
        key, key / 2, kv, torch.tensor([3], dtype=torch.int32, device=DEVICE), kv_scales=torch.tensor([1.0, 0.5], device=DEVICE)
    )
    stored = kv.float().cpu()
    assert stored.isfinite().all()
    assert stored[0, 0, 3, 0, :8].tolist() == stored[1, 0, 3, 0, :8].tolist() == [448, -448, 448, -448, 448, 448, -448, 448]


# ---- an engine


def test_a_pool_in_fp8_holds_twice_as_much_as_one_in_16_bits(scaled: Path) -> None:
    settings: dict[str, object] = {"num_blocks": 0, "kv_memory_mb": 2, "dtype": "float16"}
    narrow, wide = (Engine(config_of(scaled, kv_dtype=kv, **settings), hash_block=hash_block) for kv in ("fp8", "auto"))
    assert narrow.kv.shape.num_blocks == 2 * wide.kv.shape.num_blocks
    assert narrow.cost.kv_bytes_per_token * 2 == wide.cost.kv_bytes_per_token
    assert narrow.kv.shape.num_bytes == wide.kv.shape.num_bytes
    assert narrow.numeric_mode == wide.numeric_mode  # they may exchange KV
    for engine in (narrow, wide):
        engine.close()


def test_greedy_tokens_of_the_graphs_are_those_of_the_launches(folder: Path) -> None:
    """Weights and KV in fp8, with chunks, a cached prefix, and a preemption on the one side alone."""
    loaded, recorder = load_model(config_of(folder, quantization="fp8")), Counted()
    given = triton_of(loaded)

    def model(sizes: DecodeSizes | None, recorder: Counted | None = None) -> LoadedModel:
        own = TritonModel(given.decoder, sizes, recorder=recorder, splits=Splits(64, 4), kv_scales=given.kv_scales)
        return replace(loaded, model=own)

    expected, num_preemptions, _ = answers(model(None), folder, num_blocks=64)
    assert not num_preemptions
    found, num_preemptions, num_hits = answers(model(DecodeSizes(8, 128, 16), recorder), folder, num_blocks=6)
    assert found == expected
    assert (num_preemptions > 0, num_hits > 0, recorder.num_replayed > 5) == (True, True, True)


@pytest.mark.parametrize("settings", [{"steps_ahead": True}, {"speculation": "prompt_lookup", "draft_length": 3}], ids=str)
def test_steps_ahead_and_guesses_draw_the_same_tokens(folder: Path, settings: dict[str, object]) -> None:
    """Several choices of one prompt, too, whose last block is copied."""
    found = []
    for changes in ({"steps_ahead": False}, settings):
        config = config_of(folder, **changes)
        engine = open_engine(config, load_model(config))
        repeated = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)
        several = SamplingParams(temperature=0.9, seed=4, max_tokens=5, n=2, ignore_eos=True)
        assert engine.add(EngineRequest("0", tuple(prompt(6) * 4), repeated))
        assert engine.add(EngineRequest("1", tuple(prompt(19, 1)), several))
        collector = run_to_end(engine)
        found.append([collector.answer("0"), *(collector.answer("1", choice) for choice in (0, 1))])
        engine.close()
    assert [answer.token_ids for answer in found[0]] == [answer.token_ids for answer in found[1]]


def test_a_model_of_the_first_layers_has_their_scales(scaled: Path) -> None:
    first = triton_of(load_model(config_of(scaled))).first_layers(1)
    assert first.kv_scales is not None
    assert first.kv_scales.cpu().tolist() == [list(SCALES[0])]
