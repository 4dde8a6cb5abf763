"""Adapters in an engine: eight and the base in one batch, prefixes kept apart, loaded and unloaded while requests run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pdmesh.adapter_id import AdapterId
from pdmesh.engine.backend_selection import choose_numerics
from pdmesh.engine.config import EngineConfig
from pdmesh.engine.engine import Engine
from pdmesh.engine.errors import AdapterRefused, InvalidRequest, UnknownAdapter
from pdmesh.engine.loader.safetensors import read_config
from pdmesh.engine.lora import torch_maps
from pdmesh.engine.lora.folder import load_adapter
from pdmesh.engine.request import EngineRequest
from pdmesh.sampling_params import SamplingParams
from pdmesh.text.block_hash import hash_block
from tests.engine.backends import BACKENDS
from tests.engine.test_model_transformers import greedy, prompt, reference
from tests.support.adapters import make_adapter, merge
from tests.support.tiny_models import make_tiny_model

transformers = pytest.importorskip("transformers")
NUM_TOKENS = 16
TARGETS: list[Sequence[str] | str] = [
    ["q_proj"], ["k_proj", "v_proj"], ["o_proj"], ["gate_proj", "down_proj"], "all-linear", ["up_proj"],
    r".*\.1\.mlp\..*", ["q_proj", "o_proj"],
]  # fmt: skip
RANKS = (4, 8, 16, 32, 8, 2, 64, 1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def adapters(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Eight adapters of other maps and ranks."""
    model, parent = reference(folder), tmp_path_factory.mktemp("adapters")
    kinds = enumerate(zip(TARGETS, RANKS, strict=True))
    return [make_adapter(parent / f"a{n}", model, targets, seed=n, r=rank, size=0.3) for n, (targets, rank) in kinds]


@pytest.fixture(scope="module")
def expected(folder: Path, adapters: list[Path]) -> list[list[int]]:
    """What each adapter answers to its own prompt, then the base, by transformers with merged weights."""
    answers = [greedy(merge(reference(folder), path), PROMPTS[number], NUM_TOKENS) for number, path in enumerate(adapters)]
    return [*answers, greedy(reference(folder), PROMPTS[8], NUM_TOKENS)]


PROMPTS = [prompt(5 + 9 * number, seed=number) for number in range(9)]


def engine_of(folder: Path, lora: Sequence[Path] = (), **overrides: Any) -> Engine:
    sizes = {"num_blocks": 256, "max_num_seqs": 16, "max_num_batched_tokens": 64, "backend": "torch", "dtype": "float32"}
    named = tuple(f"{path.name}={path}" for path in lora)
    return Engine(EngineConfig(model=str(folder), lora=named, **{**sizes, **overrides}), hash_block=hash_block)


def request(name: str, token_ids: Sequence[int], adapter: AdapterId | None, num_tokens: int = NUM_TOKENS) -> EngineRequest:
    return EngineRequest(
        name, tuple(token_ids), SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True), adapter=adapter
    )


def run(engine: Engine, tokens: dict[str, list[int]] | None = None, steps: int = 10**9) -> dict[str, list[int]]:
    """Run to the end, or so many steps; return the tokens of each request."""
    tokens = {} if tokens is None else tokens
    while steps > 0 and (result := engine.step()) is not None:
        steps -= 1
        for update in result.updates:
            tokens.setdefault(update.request_id, []).extend(update.token_ids)
    return tokens


def id_of(engine: Engine, name: str) -> AdapterId:
    return next(each for each in engine.adapters.loaded if each.name == name)


@pytest.mark.parametrize("backend", BACKENDS)
def test_eight_adapters_and_the_base_in_one_batch(
    backend: str, folder: Path, adapters: list[Path], expected: list[list[int]]
) -> None:
    engine = engine_of(folder, adapters, backend=backend)
    for number in range(8):
        assert engine.add(request(str(number), PROMPTS[number], id_of(engine, f"a{number}")))
    assert engine.add(request("8", PROMPTS[8], None))
    tokens = run(engine)
    assert [tokens[str(number)] for number in range(9)] == expected
    assert len({tuple(answer) for answer in expected}) == 9
    engine.check_integrity()
    engine.close()


@pytest.mark.parametrize("backend", BACKENDS)
def test_speculation_changes_no_token_of_an_adapter(
    backend: str, folder: Path, adapters: list[Path], expected: list[list[int]]
) -> None:
    """A draft of the base's first layers, and its keys in the same pool."""
    drafting = {"speculation": "self_draft", "self_draft_layers": 1, "draft_length": 3, "max_draft_tokens": 3}
    engine = engine_of(folder, adapters, backend=backend, **drafting)
    for number in range(8):
        assert engine.add(request(str(number), PROMPTS[number], id_of(engine, f"a{number}")))
    tokens = run(engine)
    assert [tokens[str(number)] for number in range(8)] == expected[:8]
    assert engine.stats().speculation is not None
    engine.close()


def test_prefixes_are_kept_apart(folder: Path, adapters: list[Path]) -> None:
    engine = engine_of(folder, adapters)
    token_ids, models = prompt(70, seed=77), [None, id_of(engine, "a1"), id_of(engine, "a4")]
    alone = [greedy(merge(reference(folder), adapters[n]) if n >= 0 else reference(folder), token_ids, 8) for n in (-1, 1, 4)]
    for turn in range(2):
        for number, adapter in enumerate(models):
            before = engine.stats().num_prefix_hit_tokens
            engine.add(request("r", token_ids, adapter, 8))
            assert run(engine)["r"] == alone[number]
            assert engine.stats().num_prefix_hit_tokens - before == (64 if turn else 0), (turn, number)
    engine.close()


def test_the_same_name_with_other_weights_finds_no_prefix(folder: Path, adapters: list[Path]) -> None:
    engine = engine_of(folder, adapters[:1])
    token_ids = prompt(70, seed=78)
    engine.add(request("r", token_ids, id_of(engine, "a0"), 4))
    run(engine)
    assert engine.adapters.unload("a0") == 0
    engine.adapters.load(load_adapter("a0", adapters[4], engine.model_config))
    engine.add(request("r", token_ids, id_of(engine, "a0"), 8))
    assert run(engine)["r"] == greedy(merge(reference(folder), adapters[4]), token_ids, 8)
    assert engine.stats().num_prefix_hit_tokens == 0
    engine.close()


@pytest.mark.parametrize("backend", BACKENDS)
def test_adapters_come_and_go_while_requests_run(
    backend: str, folder: Path, adapters: list[Path], expected: list[list[int]]
) -> None:
    engine = engine_of(folder, adapters[:2], max_loras=3, backend=backend)
    for number in (0, 1):
        engine.add(request(str(number), PROMPTS[number], id_of(engine, f"a{number}")))
    engine.add(request("8", PROMPTS[8], None))
    tokens = run(engine, steps=4)
    leaving = id_of(engine, "a0")
    assert engine.adapters.unload("a0") == 1
    assert [each.name for each in engine.adapters.loaded] == ["a1"]
    with pytest.raises(UnknownAdapter, match="'a0' is not loaded"):
        engine.add(request("late", PROMPTS[0], leaving))
    engine.adapters.load(load_adapter("a4", adapters[4], engine.model_config))
    with pytest.raises(AdapterRefused, match="all 3 places are taken, of which 1 wait for their last requests"):
        engine.adapters.load(load_adapter("a5", adapters[5], engine.model_config))
    engine.add(request("4", PROMPTS[4], id_of(engine, "a4")))
    run(engine, tokens)
    assert {name: tokens[name] for name in ("0", "1", "4", "8")} == {str(n): expected[n] for n in (0, 1, 4, 8)}
    engine.adapters.load(load_adapter("a5", adapters[5], engine.model_config))
    engine.add(request("5", PROMPTS[5], id_of(engine, "a5")))
    assert run(engine)["5"] == expected[5]
    engine.close()


def test_an_adapter_that_leaves_may_come_back(folder: Path, adapters: list[Path], expected: list[list[int]]) -> None:
    engine = engine_of(folder, adapters[:1], max_loras=1)
    engine.add(request("0", PROMPTS[0], id_of(engine, "a0")))
    tokens = run(engine, steps=3)
    engine.adapters.unload("a0")
    engine.adapters.load(load_adapter("a0", adapters[0], engine.model_config))
    assert run(engine, tokens)["0"] == expected[0]
    engine.add(request("again", PROMPTS[0], id_of(engine, "a0")))
    assert run(engine)["again"] == expected[0]
    engine.close()


def test_a_released_request_lets_its_adapter_go(folder: Path, adapters: list[Path]) -> None:
    engine = engine_of(folder, adapters[:1], max_loras=1)
    engine.add(request("0", PROMPTS[0], id_of(engine, "a0")))
    run(engine, steps=3)
    assert engine.adapters.unload("a0") == 1
    engine.release("0")
    assert engine.step() is None
    assert not engine.adapters.slots
    engine.close()


def test_refusals(folder: Path, adapters: list[Path]) -> None:
    engine = engine_of(folder, adapters[:1])
    with pytest.raises(AdapterRefused, match="'a0' is loaded with other weights"):
        engine.adapters.load(load_adapter("a0", adapters[1], engine.model_config))
    engine.adapters.load(load_adapter("a0", adapters[0], engine.model_config))
    assert [each.name for each in engine.adapters.loaded] == ["a0"]
    assert engine.adapters.unload("b") is None
    reserved = request("r", PROMPTS[0], id_of(engine, "a0"))
    assert engine.reserve(reserved) is not None
    with pytest.raises(InvalidRequest, match="request_id, cache_root, adapter: not those of the reservation"):
        engine.restate("r", replace(reserved, adapter=None))
    engine.release("r")
    engine.close()
    without = engine_of(folder)
    with pytest.raises(AdapterRefused, match="no room for adapters; start it with --max-loras 8"):
        without.adapters.load(load_adapter("a0", adapters[0], without.model_config))
    without.close()


def test_a_bad_adapter_is_refused_before_weights_are_read(folder: Path, adapters: list[Path], tmp_path: Path) -> None:
    broken = tmp_path / "model"
    broken.mkdir()
    (broken / "config.json").write_text((folder / "config.json").read_text())
    (broken / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    with pytest.raises(ValueError, match=r"lora: gone: .*no adapter_config.json"):
        engine_of(broken, [tmp_path / "gone"])


def test_the_native_backend_is_chosen_on_the_cpu(folder: Path) -> None:
    model, config = read_config(folder), EngineConfig(model="m", max_loras=2)
    assert choose_numerics(config, model, has_int4=False, no_library="").backend == "native"
    chosen = choose_numerics(config, model, has_int4=False, no_library="there is no compiler")
    assert (chosen.backend, chosen.why_torch) == ("torch", "there is no compiler")


def test_steps_without_an_adapter_compute_no_thin_product(
    folder: Path, adapters: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def poison(page: object, x: torch.Tensor, foreign: torch.Tensor) -> torch.Tensor:
        raise AssertionError(f"computed for {len(x)} rows")

    engine = engine_of(folder, adapters[:1])
    monkeypatch.setattr(torch_maps._Page, "__call__", poison)
    engine.add(request("r", PROMPTS[8], None))
    assert run(engine)["r"] == greedy(reference(folder), PROMPTS[8], NUM_TOKENS)
    engine.add(request("a", PROMPTS[0], id_of(engine, "a0")))
    with pytest.raises(AssertionError, match="computed for 8 rows"):
        run(engine)
    engine.close()
