"""What is skipped, on numbers made by hand and on a tiny model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.sparsity import CHOICES, Skipping, figures, oracle, panels, perplexity, rows, skippable
from tests.support.tiny_models import make_tiny_model

transformers = pytest.importorskip("transformers")


def test_the_smallest_are_skipped() -> None:
    gate, up = torch.tensor([0.1, -3.0, 0.2, 1.0]), torch.tensor([100.0, 0.01, 1.0, 1.0])
    assert rows(gate, up, 0.5).tolist() == [False, True, False, True]
    assert oracle(gate, up, 0.5).tolist() == [True, False, False, True]
    assert rows(gate, up, 0.1).all()


def test_panels_stay_or_go_as_one() -> None:
    gate = torch.cat((torch.full((15,), 0.1), torch.tensor([9.0]), torch.full((16,), 0.5)))
    assert panels(gate, gate, 0.5).tolist() == [True] * 16 + [False] * 16


def test_on_a_model(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    windows = [list(range(40)), list(range(50, 90))]
    plain = perplexity(model, windows)
    skipping = Skipping(model)
    assert perplexity(model, windows) == pytest.approx(plain)
    skipping.choice, skipping.share = rows, 0.5
    assert perplexity(model, windows) != pytest.approx(plain, rel=1e-6)
    found = {figure.name: figure for figure in figures(model, windows, (0.5,))}
    assert len(found) == 1 + 2 * len(CHOICES)
    assert found["weights of a decode step that lie in up and down"].value == pytest.approx(skippable(model), abs=1e-4)
