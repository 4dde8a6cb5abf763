"""Figures of `make bench-mesh` from made-up times."""

import pytest

from benchmarks.mesh.batches import batch_figures, tpot_together, worker_figures


def test_only_the_time_in_which_all_streams_decode_counts() -> None:
    early = [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    late = [2.0, 4.0, 6.0, 8.0]
    # From 2 to 5: three tokens of the one (3, 4, 5) and one of the other (4).
    assert tpot_together([early, late]) == pytest.approx(3.0 * 2 / 4)
    assert tpot_together([early]) == pytest.approx(1.0)
    with pytest.raises(ValueError, match="never decoded together"):
        tpot_together([[0.0, 1.0], [2.0, 3.0]])


def test_figures_of_a_batch() -> None:
    figures = {figure.name: figure for figure in batch_figures(16, 1, [0.01, 0.02], [0.0105, 0.021], [(1, 4, 2), (3, 6, 4)])}
    ratio = figures["TPOT, batch 16, 1 thread, int8: through the router over the engine's"]
    assert ratio.value == pytest.approx(1.05)
    assert ratio.goal == 1.05
    assert figures["CPU of 1 000 tokens, batch 16, 1 thread, int8: worker process"].value == 5


def test_figures_of_workers() -> None:
    *_, ratio = worker_figures([90.0, 100.0, 100.0], [100.0, 100.0, 200.0])
    assert ratio.value == pytest.approx(0.9)
    assert (ratio.goal, ratio.better) == (0.95, "higher")
