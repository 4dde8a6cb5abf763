"""Two ranks give the tokens of one for every part that they can share; what they cannot is refused by name."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pdmesh.engine.engine import Engine
from pdmesh.engine.loader.loader import load_model
from pdmesh.engine.loader.safetensors import SafetensorsSource
from pdmesh.engine.models.registry import model_config
from pdmesh.engine.parallel.model import ParallelModel
from pdmesh.engine.parallel.split import Shard, ShardSource, check_degree
from pdmesh.engine.request import EngineRequest
from pdmesh.sampling_params import SamplingParams
from tests.engine.parallel.conftest import config_of, running
from tests.engine.test_model_transformers import greedy, prompt, reference
from tests.support.mock_engine import run_to_end
from tests.support.tiny_families import make_tiny_family, tiny_config

pytest.importorskip("transformers")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="not tried elsewhere yet")
GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
PROMPTS = [prompt(3, seed=1), prompt(30, seed=2), prompt(70, seed=3)]
SHARED = {
    "gemma2": {},  # softcaps, norms behind both halves
    "mixtral": {},
    "qwen2_moe": {},  # a shared expert with a gate, dense layers
    "gpt_neox": {},  # plain MLP with biases behind its sum, one stored map for queries, keys and values
    "cohere, qk norm": {},  # a weight for each head, both halves beside each other
    "gpt_oss": {},  # sinks, biases of experts, experts stored as one tensor
    "deepseek_v3": {},  # a latent that all ranks have, experts in groups
    "phi": {"vocab_size": 321},  # a bias of logits, on ranks with different rows of the head
    "gpt2": {},  # learned positions
    "olmoe": {},  # a norm over all heads, whose squares are summed over ranks
    "llama4_text": {},  # scores that multiply what experts read, queries that grow with their position, chunks
    "stablelm, qk norm": {},  # norms of heads, each stored by itself
}


def answers(engine: Engine) -> list[list[int]]:
    for index, token_ids in enumerate(PROMPTS):
        assert engine.add(EngineRequest(str(index), tuple(token_ids), GREEDY))
    collector = run_to_end(engine)
    return [list(collector.answer(str(index)).token_ids) for index in range(len(PROMPTS))]


def tokens_of_transformers(folder: Path) -> list[list[int]]:
    model = reference(folder, dtype=torch.float32, attn_implementation="eager")
    return [greedy(model, token_ids, 16) for token_ids in PROMPTS]


@pytest.mark.parametrize("variant", SHARED)
def test_two_ranks_give_the_tokens_of_one_and_of_transformers(variant: str, tmp_path: Path) -> None:
    folder = make_tiny_family(tmp_path, variant, **SHARED[variant])
    with running(config_of(folder, 1)) as engine:
        alone = answers(engine)
    with running(config_of(folder, 2)) as engine:
        assert answers(engine) == alone
    assert alone == tokens_of_transformers(folder)
    assert len({token for tokens in alone for token in tokens}) > 6


@pytest.mark.parametrize("variant", ["mixtral", "qwen2_moe", "gpt_oss"])
def test_ranks_with_whole_experts_give_the_same_tokens(variant: str, tmp_path: Path) -> None:
    folder = make_tiny_family(tmp_path, variant)
    with running(replace(config_of(folder, 2), expert_parallel=True)) as engine:
        assert answers(engine) == tokens_of_transformers(folder)
        counts = engine.expert_counts()
        experts = engine.model_config.experts
        assert counts is not None and experts is not None
        num_tokens = sum(len(token_ids) + 15 for token_ids in PROMPTS)
        assert set(counts.sum(1).tolist()) == {num_tokens * experts.top_k}, "every rank routes all tokens"


def test_a_rank_has_half_of_every_expert_or_every_expert_of_a_half(tmp_path: Path) -> None:
    """An expert of the tiny Mixtral has 96 columns; there are six."""
    folder = make_tiny_family(tmp_path, "mixtral")
    source = SafetensorsSource(folder)
    name = "model.layers.1.mlp.experts.4.down_proj.weight"
    whole = source.get(name)
    columns = [ShardSource(source, Shard(rank, 2)).get(name) for rank in range(2)]
    assert torch.equal(torch.cat(columns, 1), whole) and columns[0].shape == (64, 48)
    assert torch.equal(ShardSource(source, Shard(1, 2), expert_parallel=True).get(name), whole)
    loaded = load_model(replace(config_of(folder, 2), expert_parallel=True))
    assert isinstance(loaded.model, ParallelModel)
    try:
        held = loaded.model._share.model.layers[0].mlp.experts  # type: ignore[union-attr]
        assert [mlp is not None for mlp in held] == [True] * 3 + [False] * 3
    finally:
        loaded.model.close()


def config(variant: str, **fields: object) -> object:
    return model_config({**tiny_config(variant).to_dict(), **fields})


@pytest.mark.parametrize(
    ("variant", "settings", "message"),
    [
        ("olmo2", {"device": "cuda"}, "tensor_parallel: QK norm over all heads on CUDA cannot be computed by several"),
        ("deepseek_v3", {"device": "cuda"}, "tensor_parallel: latent attention on CUDA cannot be computed by several ranks"),
        ("falcon", {}, "tensor_parallel: 2 does not divide the model's 1 KV heads; give one of 1$"),
        ("llama", {"expert_parallel": True}, "expert_parallel: the model has no experts; leave it out"),
    ],
)
def test_what_cannot_be_shared_is_named(variant: str, settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_degree(2, config(variant), **settings)  # type: ignore[arg-type]


def test_counts_that_do_not_fit_are_named() -> None:
    mixtral = config("mixtral", num_key_value_heads=4, intermediate_size=90)
    message = "tensor_parallel: 4 does not divide the model's 90 columns of an expert; give one of 1, 2"
    with pytest.raises(ValueError, match=message):
        check_degree(4, mixtral)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="4 does not divide the model's 6 experts; give one of 1, 2"):
        check_degree(4, mixtral, expert_parallel=True)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="expert_parallel: one rank has them all, as tensor_parallel is 1; leave it out"):
        check_degree(1, mixtral, expert_parallel=True)  # type: ignore[arg-type]
