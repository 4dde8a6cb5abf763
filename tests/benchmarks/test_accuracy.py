"""The accuracy benchmark: its text is fixed, its numbers are right on distributions made by hand, it sees a model that is off."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks import accuracy as benchmarks_accuracy
from benchmarks.accuracy import (
    BASE,
    CHUNK,
    FILES,
    GOALS,
    KV_GOALS,
    MIN_CHARACTERS,
    ROWS,
    VARIANTS,
    LogitsFile,
    Sizes,
    Variant,
    accuracy_figures,
    common_prefix,
    cut_windows,
    decode_starts,
    fixed_text,
    parse_args,
    perplexity_ratio,
    prose,
    score,
    summarize,
    table,
    zen,
)
from benchmarks.harness import Figure, missed
from pdmesh.engine.config import EngineConfig
from pdmesh.engine.loader.loader import LoadedModel, load_model
from pdmesh.engine.runner.batch import StepBatch
from pdmesh.text.tokenizer import Tokenizer
from tests.support.tiny_models import VOCAB_SIZE, make_tiny_model, write_byte_tokenizer

# Longer than a chunk of prefill, and not a whole number of blocks.
SMALL = Sizes(
    num_windows=3, window_tokens=CHUNK + 22, num_prompts=2, prompt_tokens=20, new_tokens=12, decode_batch=2, decode_steps=24
)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("transformers")
    return make_tiny_model(tmp_path_factory.mktemp("tiny"), "llama")


def test_text_is_long_fixed_prose() -> None:
    text = fixed_text()
    assert text == fixed_text()
    assert text.startswith("The Zen of Python, by Tim Peters")
    assert ">>>" not in text
    assert len(text) > 100_000


def test_prose_is_in_source_order_without_labels_and_examples() -> None:
    long = "A sentence that goes on. " * (MIN_CHARACTERS // 20)
    source = f'"""Module. {long}"""\nclass A:\n    """Short."""\n    def f():\n        """In A. {long}"""\n'
    source += f'def g():\n    """Example. {long}\n\n    >>> g()\n    """\nasync def h():\n    """Last. {long}"""\n'
    assert [text.split(".")[0] for text in prose(source)] == ["Module", "In A", "Last"]


def test_zen_reads_the_first_string_and_runs_nothing() -> None:
    assert zen('s = """Gur Mra"""\nraise SystemExit\n') == "The Zen"


def test_a_stripped_library_is_named(tmp_path: Path) -> None:
    (tmp_path / "this.py").write_text("s = 'Gur Mra'")
    with pytest.raises(ValueError, match=FILES[0]):
        fixed_text(tmp_path)


def test_windows_follow_each_other_and_the_digest_is_of_what_they_cover(tmp_path: Path) -> None:
    write_byte_tokenizer(tmp_path)
    tokenizer = Tokenizer.load(tmp_path)
    windows = cut_windows(tokenizer, "abcdefgh", 2, 3)
    assert [tokenizer.decode(window) for window in windows.token_ids] == ["abc", "def"]
    assert windows.digest == cut_windows(tokenizer, "abcdefXX", 3, 2).digest
    assert windows.digest != cut_windows(tokenizer, "abcdeXgh", 2, 3).digest
    with pytest.raises(ValueError, match="3 of 3 tokens are more than the text's 8"):
        cut_windows(tokenizer, "abcdefgh", 3, 3)


def logits_of(*rows: tuple[float, ...]) -> Tensor:
    return torch.tensor(rows).log()


def test_scores_of_known_distributions() -> None:
    reference, ours = logits_of((0.5, 0.25, 0.25), (0.2, 0.2, 0.6)), logits_of((0.25, 0.5, 0.25), (0.2, 0.2, 0.6))
    scores = score(reference, ours, torch.tensor([0, 2]))
    assert scores.nll.tolist() == pytest.approx([math.log(4), -math.log(0.6)])
    assert scores.kl.tolist() == pytest.approx([0.25 * math.log(2), 0.0], abs=1e-7)
    assert scores.agrees.tolist() == [False, True]
    accuracy = summarize(scores)
    assert accuracy.perplexity == pytest.approx(math.sqrt(4 / 0.6))
    assert accuracy.kl_mean == pytest.approx(0.125 * math.log(2))
    assert accuracy.agreement == 0.5


def test_ratio_of_perplexities_and_its_error() -> None:
    text = torch.tensor([0, 0, 1, 1])
    base = score(torch.zeros(4, 2), torch.zeros(4, 2), text)
    ours = score(torch.zeros(4, 2), logits_of(*[(0.2, 0.8)] * 4), text)
    ratio, error = perplexity_ratio(ours, base)
    assert ratio == pytest.approx(summarize(ours).perplexity / summarize(base).perplexity)
    assert error == pytest.approx(ratio * math.log(4) / math.sqrt(3) / 2)  # differences of ± log 4 / 2 about their mean
    assert perplexity_ratio(base, base) == (1.0, 0.0)


def test_a_uniform_model_has_the_vocabulary_as_perplexity() -> None:
    logits = torch.full((5, 320), 7.0)
    assert summarize(score(logits, logits, torch.arange(5))).perplexity == pytest.approx(320.0)


def test_scores_do_not_depend_on_a_shift_and_take_large_logits() -> None:
    reference, targets = torch.randn(3 * ROWS + 1, 50), torch.arange(3 * ROWS + 1) % 50
    ours = reference + 0.1 * torch.randn_like(reference)
    plain, shifted = score(reference, ours, targets), score(reference + 256, ours - 1024, targets)
    torch.testing.assert_close(shifted.kl, plain.kl, rtol=1e-3, atol=1e-5)  # the shift rounds float32 logits
    extreme = score(torch.tensor([[1e4, -1e4, 0.0]]), torch.tensor([[-1e4, 1e4, 0.0]]), torch.tensor([0]))
    assert extreme.kl.item() == pytest.approx(2e4)
    assert extreme.nll.item() == pytest.approx(2e4)
    assert summarize(extreme).perplexity == math.inf


def test_blocks_of_rows_change_nothing() -> None:
    reference, ours, targets = torch.randn(2 * ROWS + 3, 40), torch.randn(2 * ROWS + 3, 40), torch.arange(2 * ROWS + 3)
    together = score(reference, ours, targets)
    for row in range(len(targets)):
        alone = score(reference[row : row + 1], ours[row : row + 1], targets[row : row + 1])
        assert (alone.nll[0], alone.kl[0], alone.agrees[0]) == (together.nll[row], together.kl[row], together.agrees[row])
    expected = torch.nn.functional.cross_entropy(ours.double(), targets, reduction="none")
    torch.testing.assert_close(together.nll, expected)


def test_tokens_that_the_reference_rules_out_add_nothing() -> None:
    ruled_out = torch.tensor([[0.0, 0.0, -math.inf]])
    assert score(ruled_out, torch.zeros(1, 3), torch.tensor([0])).kl.item() == pytest.approx(math.log(1.5))
    assert score(ruled_out, ruled_out, torch.tensor([0])).kl.item() == 0.0
    assert score(torch.zeros(1, 3), ruled_out, torch.tensor([0])).kl.item() == math.inf


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_without_a_distribution_are_refused(bad: float) -> None:
    good, broken = torch.zeros(2, 4), torch.zeros(2, 4)
    broken[1, 2] = bad
    with pytest.raises(ValueError, match="the engine: 1 of 2 rows"):
        score(good, broken, torch.tensor([0, 1]))
    with pytest.raises(ValueError, match="the reference: 1 of 2 rows"):
        score(broken, good, torch.tensor([0, 1]))
    with pytest.raises(ValueError, match="differ"):
        score(good, good[:1], torch.tensor([0, 1]))


def test_equal_logits_agree_on_the_lowest_token() -> None:
    assert score(torch.tensor([[0.0, 1.0, 1.0]]), torch.tensor([[0.0, 2.0, 1.0]]), torch.tensor([0])).agrees.item()


def test_common_prefix() -> None:
    assert common_prefix([1, 2, 3], [1, 2, 4]) == 2
    assert common_prefix([1, 2], [1, 2, 4]) == 2
    assert common_prefix([], [1]) == 0


def test_logits_file_gives_back_what_was_put_in() -> None:
    windows = [torch.randn(5, 7), torch.randn(3, 7).t(), torch.randn(2, 7)]
    with tempfile.TemporaryFile() as file:
        logits = LogitsFile(file)
        for window in windows[:2]:
            logits.append(window)
        assert torch.equal(logits.read(0), windows[0])
        logits.append(windows[2])
        for index in (2, 1, 0):
            assert torch.equal(logits.read(index), windows[index])


def figures_of(folder: Path, *names: str) -> dict[str, Figure]:
    return {figure.name: figure for figure in accuracy_figures(folder, {name: VARIANTS[name] for name in names}, SMALL)}


def number(figures: dict[str, Figure], beginning: str, variant: str) -> float:
    [value] = [figure.value for name, figure in figures.items() if name.startswith(beginning) and name.endswith(f": {variant}")]
    assert isinstance(value, float)
    return value


def test_float32_is_transformers_and_bfloat16_is_close(tiny: Path) -> None:
    figures = figures_of(tiny, "float32", BASE)
    perplexity = figures["perplexity: transformers, fp32"].value
    assert number(figures, "perplexity:", "float32") == pytest.approx(perplexity, rel=1e-5)
    assert number(figures, "KL divergence, 99th", "float32") < 1e-6
    assert number(figures, "greedy agreement", "float32") == 1.0
    assert number(figures, "greedy text", "float32") == SMALL.new_tokens
    assert 1e-6 < number(figures, "KL divergence, mean", BASE) < 0.1
    assert number(figures, "greedy agreement", BASE) > 0.8
    assert number(figures, "perplexity, of bfloat16's", "float32") == pytest.approx(1.0, abs=0.1)
    assert len(str(figures["text: 3 windows of 150 tokens"].value)) == 64
    assert [number(figures, "largest difference", name) for name in ("float32", BASE)] == [0.0, 0.0]


def test_every_variant_runs_where_there_are_native_kernels(tiny: Path) -> None:
    try:
        figures = accuracy_figures(tiny, VARIANTS, SMALL)
    except ValueError as refused:
        if "needs backend=native" not in str(refused):
            raise
        pytest.skip(str(refused))
    goals = {figure.name: figure.goal for figure in figures if figure.unit.startswith("ratio")}
    assert goals == {f"perplexity, of {BASE}'s: {name}": _goal(name) for name in VARIANTS if name != BASE}
    assert all(figure.value == 0 for figure in figures if figure.name.startswith("largest difference"))


def _goal(variant: str) -> float | None:
    of_weights = next((goal for kind, goal in GOALS.items() if variant.startswith(kind)), None)
    return of_weights or (KV_GOALS["int8"] if variant == "bfloat16 + int8 KV" else None)


def test_without_the_base_there_is_no_ratio(tiny: Path) -> None:
    assert not [name for name in figures_of(tiny, "float32") if name.startswith("perplexity, of")]


class OffInDecode:
    """A model whose steps of single tokens are not those of prefill."""

    def __init__(self, loaded: LoadedModel) -> None:
        self.model = loaded.model

    def forward(self, batch: StepBatch, kv: Tensor, signal: object = None) -> Tensor:
        logits = self.model.forward(batch, kv)
        return logits + 0.125 if batch.num_tokens == batch.num_seqs else logits


class ForgetsKeys(OffInDecode):
    """A model whose steps of single tokens leave no keys and values behind."""

    def forward(self, batch: StepBatch, kv: Tensor, signal: object = None) -> Tensor:
        return self.model.forward(batch, kv.clone() if batch.num_tokens == batch.num_seqs else kv)


@pytest.mark.parametrize(("broken", "least"), [(OffInDecode, 0.12), (ForgetsKeys, 0.01)])
def test_a_decode_path_that_is_off_shows(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, broken: type[OffInDecode], least: float
) -> None:
    def load_broken(config: EngineConfig) -> LoadedModel:
        loaded = load_model(config)
        return replace(loaded, model=broken(loaded))  # type: ignore[arg-type]

    monkeypatch.setattr(benchmarks_accuracy, "load_model", load_broken)
    figures = accuracy_figures(tiny, {"float32": {"dtype": "float32", "backend": "torch"}}, SMALL)
    [difference] = [figure for figure in figures if figure.name.startswith("largest difference")]
    assert isinstance(difference.value, float)
    assert difference.value > least
    assert missed(difference)


def test_a_slot_takes_no_more_than_it_has(tiny: Path) -> None:
    variant = Variant(tiny, {"dtype": "float32"}, slot_tokens=32, num_slots=2)
    assert variant.prefill(1, range(32)).shape == (32, VOCAB_SIZE)
    with pytest.raises(ValueError, match="33 tokens do not fit"):
        variant.prefill(0, range(33))
    variant.close()


def test_decode_starts_are_spread_and_leave_room() -> None:
    starts = decode_starts(512, 4, 64)
    assert starts == [112, 223, 334, 445]
    assert decode_starts(150, 2, 24) == [63, 125]
    assert len({start % 16 for start in starts}) == 4


def test_goals_and_the_table() -> None:
    assert {str(overrides["quantization"]) for overrides in VARIANTS.values() if "quantization" in overrides} == set(GOALS)
    good = Figure("perplexity, of bfloat16's: int8", 1.009, "ratio", "lower", goal=1.01)
    bad, free = replace(good, name="int4", value=1.06, goal=1.05), replace(good, name="float32", goal=None)
    assert [missed(figure) for figure in (good, bad, free)] == [False, True, False]
    lines = table([good, bad, free]).splitlines()
    assert lines[0].endswith("1.009 ratio   goal 1.01: met")
    assert lines[1].endswith("1.06 ratio   goal 1.05: MISSED")
    assert lines[2].endswith("1.009 ratio")


def test_arguments_name_what_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    assert parse_args(["--variants", "int8 + int8 KV, bfloat16"]).variants == {
        "int8 + int8 KV": VARIANTS["int8 + int8 KV"],
        BASE: VARIANTS[BASE],
    }
    for wrong, message in (["--variants=int3"], "int3 not known"), (["--windows=0"], "less than 1"):
        with pytest.raises(SystemExit):
            parse_args(wrong)
        assert message in capsys.readouterr().err
