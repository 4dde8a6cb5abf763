"""The benchmark of adapters: its steps compute them, and its limit is the one by bytes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.lora import BATCH, CONTEXT, SLOTS, Steps, batch_of, limit_of, measured
from pdmesh.engine.lora.adapter import sites_of
from tests.engine.paged_loop import load
from tests.support.tiny_models import make_tiny_model


def test_on_a_model(tmp_path: Path) -> None:
    loaded = load(make_tiny_model(tmp_path), backend="torch", dtype="float32", max_loras=4)
    steps, batch = Steps.of(loaded), batch_of([CONTEXT])
    base, adapted = (loaded.model.forward(each, steps.pool) for each in (batch, replace(batch, adapter_slots=SLOTS)))
    assert len(base) == BATCH
    assert not any(torch.equal(*rows) for rows in zip(base, adapted, strict=True))
    numbers = 4 * 16 * sum(outputs + inputs for outputs, inputs in sites_of(loaded.config).values())
    assert limit_of(loaded, 4000) == pytest.approx(1 + numbers / 1000)
    figure = measured("tiny", loaded, 1, 1)
    assert isinstance(figure.value, float) and figure.value > 0
    assert figure.limit is not None and figure.limit > 1
