"""Tokens of experts: what a model counts, what a window shows of it, what a worker's page says."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from pdmesh.engine.engine import Engine
from pdmesh.engine.models.decoder import DecoderModel
from pdmesh.engine.models.experts import Experts
from pdmesh.runtime.telemetry.config import TelemetryConfig
from pdmesh.worker import metrics
from pdmesh.worker.load import ExpertWindow
from tests.engine.paged_loop import PagedLoop, load
from tests.runtime.telemetry.scrape import scrape
from tests.support.mini_router import MiniRouter
from tests.support.tiny_families import make_tiny_family
from tests.support.worker_mesh import LOCAL, load_tiny, running_worker, token_request

pytest.importorskip("transformers")
NUM_LAYERS, NUM_EXPERTS, TOP_K = 4, 6, 2  # of the tiny Mixtral


def counts(*layers: Sequence[int]) -> torch.Tensor:
    return torch.tensor(layers)


def test_loads_are_over_the_mean_of_a_layer() -> None:
    """Layer 0: 12, 4, 0, 0 over a mean of 4; layer 1: even."""
    seen = ExpertWindow().take(counts([12, 4, 0, 0], [5, 5, 5, 5]), 0.0)
    assert seen.num_tokens == 36
    assert seen.imbalances == {"mean": 2.0, "max": 3.0}
    assert seen.loads == pytest.approx({0.0: 0.0, 0.5: 1.0, 0.9: 1.6, 1.0: 3.0})
    assert seen.idle_share == 2 / 8


def test_only_the_window_counts() -> None:
    window = ExpertWindow(60)
    assert window.take(counts([0, 0]), 0.0).loads == {}
    assert window.take(counts([9, 1]), 30.0).imbalances["max"] == 1.8
    assert window.take(counts([10, 4]), 65.0).imbalances["max"] == pytest.approx(10 / 7), "since the look at 0"
    assert window.take(counts([10, 8]), 91.0).imbalances["max"] == pytest.approx(7 / 4), "since the look at 30"
    assert window.take(counts([10, 8]), 500.0).imbalances == {}, "nothing since the look at 91"


def test_many_looks_keep_few_counts() -> None:
    window = ExpertWindow(60)
    for number in range(1000):
        seen = window.take(counts([number, 0]), number / 10)
    assert seen.num_tokens == 999 and len(window._seen) <= 14


def test_counts_that_go_on_do_not_change_what_was_seen() -> None:
    window, live = ExpertWindow(), counts([2, 2])
    window.take(live, 0.0)
    live += counts([4, 0])
    assert window.take(live, 1.0).imbalances["max"] == 2.0


def test_a_model_counts_each_token_once_for_every_expert_that_it_took(tmp_path: Path) -> None:
    """Steps of 5 and 2 tokens, whose rows are padded to 8 and 4: padding is counted nowhere."""
    loaded = load(make_tiny_family(tmp_path, "mixtral"), backend="torch", dtype="float32")
    PagedLoop(loaded).logits(list(range(7)), 5)
    found = loaded.expert_counts()
    assert found is not None and found.shape == (NUM_LAYERS, NUM_EXPERTS)
    assert found.sum(1).tolist() == [7 * TOP_K] * NUM_LAYERS
    assert isinstance(loaded.model, DecoderModel)
    first = loaded.model.layers[0].mlp
    assert isinstance(first, Experts) and torch.equal(first.counts, found[0])


def test_a_model_without_experts_has_no_counts(tmp_path: Path) -> None:
    loaded = load(make_tiny_family(tmp_path, "llama"), backend="torch", dtype="float32")
    assert loaded.expert_counts() is None


async def test_a_workers_page_shows_them(tmp_path: Path) -> None:
    model, router = load_tiny(make_tiny_family(tmp_path, "qwen3_moe")), MiniRouter()
    shown = TelemetryConfig(metrics_port=0)
    async with running_worker(model, roles=("decode",), worker_id="d", telemetry=shown) as peer:
        await router.attach(peer)
        await router.submit(peer, "r", token_request(list(range(10, 40))), mode=LOCAL)
        await router.until_finished("r", 1)
        page = await asyncio.to_thread(scrape, peer.worker.metrics.url)
        engine: Engine = peer.engine
        found = engine.expert_counts()
        assert found is not None and page.value("pdmesh_experts_tokens_total") == int(found.sum()) > 0
        assert page.value("pdmesh_experts_imbalance_ratio", layers="max") >= page.value(
            "pdmesh_experts_load_ratio", quantile="0.5"
        )
        names = {sample.name for sample in page.samples}
        assert all(set(instrument.samples) <= names for instrument in metrics.EXPERTS)
        experts = [sample for sample in page.samples if sample.name.startswith("pdmesh_experts")]
        assert len(experts) == 8, "as many series as for any other number of experts"
        await router.detach()
