"""A process whose memory stands still passes, noise and a filling cache included; one that leaks does not."""

import random

import pytest

from tests.soak.samples import flatness, line

REQUESTS = [140.0 * number for number in range(360)]  # an hour, a sample every ten seconds


def _memory(leak_mb_per_1000: float, *, base_mb: float = 1500.0, noise_mb: float = 4.0, cache_mb: float = 200.0) -> list[float]:
    """A cache that fills within the first third, noise, and what leaks."""
    chance = random.Random(1)
    full_at = REQUESTS[-1] / 4
    return [
        base_mb + min(1.0, at / full_at) * cache_mb + chance.uniform(-noise_mb, noise_mb) + leak_mb_per_1000 * at / 1000
        for at in REQUESTS
    ]


def test_a_line_goes_through_its_points() -> None:
    slope, first = line([10, 20, 30], [3, 5, 7])
    assert slope == pytest.approx(0.2)
    assert first == pytest.approx(3)


def test_a_line_through_one_place_is_level() -> None:
    assert line([5, 5], [1, 3]) == (0.0, 2.0)


def test_a_cache_that_fills_is_no_leak() -> None:
    flat = flatness(REQUESTS, _memory(0.0))
    assert flat.problems == []
    assert abs(flat.slope) < 0.1
    assert flat.last_third - flat.first_third > 20  # it did grow, early


def test_shrinking_is_flat() -> None:
    assert flatness(REQUESTS, _memory(-5.0)).problems == []


def test_a_leak_of_1500_bytes_a_request_is_caught_by_its_slope() -> None:
    flat = flatness(REQUESTS, _memory(1.5))
    assert flat.slope == pytest.approx(1.5, abs=0.1)
    assert [problem for problem in flat.problems if "1000 requests" in problem]


def test_a_small_process_that_doubles_is_caught_by_its_growth() -> None:
    flat = flatness(REQUESTS, _memory(0.2, base_mb=10, noise_mb=0.1, cache_mb=0))
    assert flat.slope < 1
    assert [problem for problem in flat.problems if "last half" in problem]


def test_too_few_samples_say_nothing() -> None:
    with pytest.raises(ValueError, match="too few"):
        flatness([1, 2, 3], [1, 2, 3])
