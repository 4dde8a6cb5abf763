"""Proposers as an engine's configuration names them: they are made, they guess, and no token changes."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from pdmesh.engine.config import EngineConfig
from pdmesh.engine.engine import Engine
from pdmesh.engine.loader.loader import LoadedModel, load_model
from pdmesh.engine.speculation.draft_heads.weights import FILE, BadHeads, save_heads
from pdmesh.engine.speculation.draft_models.proposer import ModelDraft
from pdmesh.engine.speculation.proposer import Ask
from pdmesh.engine.speculation.setup import names_for
from tests.engine.backends import BACKENDS
from tests.engine.speculation.heads.tiny_heads import make_heads
from tests.engine.speculation.models.driver import count_passes, decoding, request
from tests.support.mock_engine import open_engine, run_to_end
from tests.support.tiny_models import VOCAB_SIZE, make_tiny_model

LENGTH = 5
PROMPT = (5, 9, 9, 31, 200, 7)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model whose output soon repeats itself: n-grams have something to guess. Its second layer adds nothing, so
    that the first alone draws the same."""
    folder = make_tiny_model(tmp_path_factory.mktemp("looping"), initializer_range=0.05)
    [path] = folder.glob("*.safetensors")
    tensors = load_file(path)
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        tensors[f"model.layers.1.{name}.weight"].zero_()
    save_file(tensors, path, metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def loaded(folder: Path) -> LoadedModel:
    return load_model(EngineConfig(str(folder), num_threads=1))


@pytest.fixture
def heads(loaded: LoadedModel, tmp_path: Path) -> Path:
    path = tmp_path / "heads.safetensors"
    made = make_heads(hidden_size=loaded.config.hidden_size, vocab_size=VOCAB_SIZE)
    save_heads(replace(made, trained_for=loaded.weights_hash), path)
    return path


def engine_of(folder: Path, loaded: LoadedModel, **settings: object) -> Engine:
    sizes = {"num_blocks": 64, "max_context": 512, "num_threads": 1, "max_num_batched_tokens": 64}
    given: dict[str, object] = {**sizes, "speculation": "none", **settings}
    return open_engine(EngineConfig(str(folder), **given), loaded)  # type: ignore[arg-type]


def output(engine: Engine, **sampling: object) -> tuple[int, ...]:
    assert engine.add(request("r", PROMPT, **{"max_tokens": 120, **sampling}))  # type: ignore[arg-type]
    return tuple(run_to_end(engine).answer("r").token_ids)


@pytest.mark.parametrize(
    ("speculation", "guess"),
    [
        ("draft_model", ["draft_model"]),
        ("self_draft", ["self_draft"]),
        ("heads", ["heads"]),
        ("auto", ["prompt_lookup", "heads", "draft_model", "self_draft"]),
    ],
)
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_who_is_named_guesses(
    folder: Path, loaded: LoadedModel, heads: Path, speculation: str, guess: list[str], temperature: float
) -> None:
    given = {
        "draft_model": str(folder),
        "max_draft_tokens": LENGTH,
        "draft_heads": str(heads),
        "self_draft_layers": 1,
        "draft_length": LENGTH,
    }
    engine = engine_of(folder, loaded, speculation=speculation, **given)
    assert engine.speculator is not None
    assert [proposer.name for proposer in engine.speculator._proposers] == guess
    assert output(engine, temperature=temperature) == output(engine_of(folder, loaded), temperature=temperature)
    stats = engine.speculator.tally.stats()
    assert stats.num_drafts > 15
    if len(guess) == 1:
        assert sum(stats.by_proposer[guess[0]].verified) > 60


@pytest.mark.parametrize("speculation", ["draft_model", "self_draft"])
def test_ngrams_save_passes_of_the_model_that_drafts(folder: Path, loaded: LoadedModel, speculation: str) -> None:
    given: dict[str, object] = {"speculation": speculation, "draft_length": LENGTH, "max_draft_tokens": LENGTH}
    given |= {"draft_model": str(folder)} if speculation == "draft_model" else {"self_draft_layers": 1}
    num_passes, outputs, drafted = [], [], []
    for is_helped in (True, False):
        engine = engine_of(folder, loaded, **given)
        proposer = only_proposer(engine)
        if not is_helped:
            proposer._inner = None
        passes = count_passes(proposer)
        outputs.append(output(engine, max_tokens=400))
        num_passes.append(len(passes))
        assert engine.speculator is not None
        drafted.append(engine.speculator.tally.stats().by_proposer)
    assert outputs[0] == outputs[1] == output(engine_of(folder, loaded), max_tokens=400)
    assert drafted[0] == drafted[1]
    assert num_passes[0] < 0.75 * num_passes[1]


def only_proposer(engine: Engine) -> ModelDraft:
    assert engine.speculator is not None
    [door] = engine.speculator._proposers
    proposer = door._proposer
    assert isinstance(proposer, ModelDraft)
    return proposer


@pytest.mark.parametrize("speculation", ["draft_model", "self_draft"])
def test_a_draft_of_one_leaves_a_block_for_each_that_runs(folder: Path, loaded: LoadedModel, speculation: str) -> None:
    """Each sequence is in its first block, a draft for one of them would take a second: of those, two are free."""
    given = {"speculation": speculation, "draft_model": str(folder), "self_draft_layers": 1}
    for num_running, is_drafted in ((1, True), (2, False)):
        engine = engine_of(folder, loaded, num_blocks=2 + num_running, **given)
        for number in range(num_running):
            assert engine.add(request(str(number), (number,) * 13, max_tokens=20))
        assert engine.step() is not None
        first = decoding(engine)[0]
        assert (first.num_tokens, len(first.block_ids)) == (14, 1)
        [draft] = only_proposer(engine).propose([Ask(first, 4, 4)])
        assert bool(draft) == is_drafted


class TestHeads:
    def test_of_other_weights_are_warned_of(
        self, folder: Path, loaded: LoadedModel, heads: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        with caplog.at_level(logging.WARNING):
            engine_of(folder, loaded, speculation="heads", draft_heads=str(heads))
            assert not caplog.records
            engine_of(folder, replace(loaded, weights_hash="others"), speculation="heads", draft_heads=str(heads))
        assert "draft_heads: " in caplog.text and "trained for other weights" in caplog.text

    def test_of_another_size_are_refused(self, folder: Path, loaded: LoadedModel, heads: Path) -> None:
        save_heads(make_heads(hidden_size=48, vocab_size=VOCAB_SIZE), heads)
        with pytest.raises(ValueError, match=f"draft_heads: {heads}: hidden_size: 48, but the model has"):
            engine_of(folder, loaded, speculation="heads", draft_heads=str(heads))

    @pytest.mark.parametrize("is_damaged", [False, True])
    def test_beside_the_model_that_do_not_fit_are_not_used_by_default(
        self, folder: Path, loaded: LoadedModel, caplog: pytest.LogCaptureFixture, is_damaged: bool
    ) -> None:
        """Nobody asked for them: a worker starts all the same. Who names them is told."""
        beside, fitting = folder / FILE, make_heads(hidden_size=loaded.config.hidden_size, vocab_size=VOCAB_SIZE)
        try:
            save_heads(fitting, beside)
            assert names_for(EngineConfig(str(folder)), loaded) == ("prompt_lookup", "heads")
            save_heads(make_heads(hidden_size=48, vocab_size=VOCAB_SIZE), beside)
            if is_damaged:
                beside.write_bytes(b"no heads")
            with caplog.at_level(logging.WARNING):
                engine_of(folder, loaded, speculation="auto")
            assert caplog.text.count(f"draft_heads: {beside} lies beside the model and is not used: ") == 1
            with pytest.raises(ValueError, match=f"draft_heads: {beside}: "):
                engine_of(folder, loaded, speculation="heads")
        finally:
            beside.unlink()

    def test_that_are_damaged_are_refused(self, folder: Path, loaded: LoadedModel, heads: Path) -> None:
        heads.write_bytes(heads.read_bytes()[:-9])
        with pytest.raises(BadHeads, match=f"draft_heads: {heads}: it cannot be read"):
            engine_of(folder, loaded, speculation="auto", draft_heads=str(heads))

    @pytest.mark.parametrize("kind", ["recurrent", "medusa"])
    @pytest.mark.parametrize("backend", ["native", "torch"])
    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    def test_of_huge_weights_change_no_token(
        self, folder: Path, heads: Path, kind: str, backend: str, temperature: float
    ) -> None:
        """What they compute are no numbers: nobody verifies that."""
        loaded = load_model(EngineConfig(str(folder), num_threads=1, backend=backend))
        made = make_heads(kind, hidden_size=loaded.config.hidden_size, vocab_size=VOCAB_SIZE)
        huge = tuple(replace(block, mix=block.mix * 1e37, down=block.down * 1e37) for block in made.blocks)
        save_heads(replace(made, head=made.head * 1e37, blocks=huge), heads)
        engine = engine_of(folder, loaded, speculation="heads", draft_heads=str(heads), draft_length=LENGTH, backend=backend)
        assert output(engine, temperature=temperature) == output(engine_of(folder, loaded), temperature=temperature)
        assert engine.speculator is not None
        [proposer] = engine.speculator._proposers
        assert engine.add(request("again", PROMPT, temperature=temperature))
        assert engine.step() is not None
        [draft] = proposer.propose([Ask(sequence, 4, 4) for sequence in decoding(engine)])
        assert all(0.0 < chance < 1.001 for chance in draft.chances)


@pytest.mark.parametrize("backend", BACKENDS)
def test_auto_leaves_torch_s_steps_alone_unless_something_is_given(folder: Path, backend: str) -> None:
    loaded = load_model(EngineConfig(str(folder), num_threads=1, backend=backend))
    assert (engine_of(folder, loaded, speculation="auto").speculator is None) == (backend == "torch")
    for given in ({"speculation": "prompt_lookup"}, {"speculation": "auto", "draft_length": LENGTH}):
        assert engine_of(folder, loaded, **given).speculator is not None
