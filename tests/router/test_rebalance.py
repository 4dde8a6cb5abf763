"""One running sequence moves now and then: tables, and bounds that hold for any loads."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.fleet.migration import Move, RebalanceLimits, Rebalancer, WorkerTpot, load_share
from router.routing.worker_snapshot import WorkerSnapshot
from tests.router.fleets import worker

LIMITS = RebalanceLimits(patience_s=2.0, period_s=1.0, cooldown_s=5.0)


def decode(name: str, used: float, num_seqs: int = 10) -> WorkerSnapshot:
    return replace(
        worker(name), num_total_blocks=1000, num_free_blocks=round(1000 * (1 - used)), num_seqs=num_seqs, max_num_seqs=100
    )


def decide(workers: list[WorkerSnapshot], tpots: dict[str, WorkerTpot] | None = None, seconds: int = 3) -> list[Move]:
    """The moves of some seconds in which nothing changes."""
    rebalancer = Rebalancer(LIMITS)
    by_key = {view.key: tpots[view.worker_id] for view in workers if tpots and view.worker_id in tpots}
    return [move for tenth in range(10 * seconds) if (move := rebalancer.decide(workers, by_key, tenth / 10))]


@pytest.mark.parametrize(
    ("workers", "moves"),
    [
        ([decode("d0", 0.95), decode("d1", 0.2)], True),
        ([decode("d0", 0.95), decode("d1", 0.7)], False),  # the other is not much better off
        ([decode("d0", 0.85), decode("d1", 0.1)], False),  # not nearly full
        ([decode("d0", 0.95)], False),
        ([decode("d0", 0.95, num_seqs=1), decode("d1", 0.2)], False),  # alone it is no better off elsewhere
        ([decode("d0", 0.1, num_seqs=95), decode("d1", 0.1)], True),  # places run out, too
        ([decode("d0", 0.95), replace(decode("d1", 0.2), identity=("other",))], False),
        ([decode("d0", 0.95), replace(decode("d1", 0.2), decode=False)], False),
    ],
)
def test_who_is_nearly_full_gives_one_away(workers: list[WorkerSnapshot], moves: bool) -> None:
    made = decide(workers)
    assert bool(made) is moves
    if made:
        assert (made[0].source, made[0].target) == (workers[0].key, workers[1].key)
        assert "d0 is 95% full" in made[0].reason


@pytest.mark.parametrize(
    ("mine_s", "goal_s", "others_s", "others_seqs", "moves"),
    [
        (0.1, 0.05, 0.02, 3, True),
        (0.1, 0.05, 0.09, 3, False),  # no faster there
        (0.04, 0.05, 0.01, 3, False),  # the objective is met
        (0.1, None, 0.01, 3, False),
        (0.1, 0.05, None, 3, False),  # who knows
        (0.1, 0.05, None, 0, True),  # nobody is there
    ],
)
def test_who_breaks_the_objective_gives_one_away(
    mine_s: float, goal_s: float | None, others_s: float | None, others_seqs: int, moves: bool
) -> None:
    tpots = {"d0": WorkerTpot(mine_s, goal_s)} | ({"d1": WorkerTpot(others_s)} if others_s else {})
    assert bool(decide([decode("d0", 0.5), decode("d1", 0.1, others_seqs)], tpots)) is moves


def test_a_need_must_last() -> None:
    rebalancer, full, fine = Rebalancer(LIMITS), decode("d0", 0.95), decode("d0", 0.5)
    other = decode("d1", 0.1)
    moves = [rebalancer.decide([full if tenth % 10 else fine, other], {}, tenth / 10) for tenth in range(100)]
    assert not any(moves)


def test_who_has_just_given_one_away_is_left_alone() -> None:
    assert len(decide([decode("d0", 0.95), decode("d1", 0.2)], seconds=12)) == 2


LOADS = st.lists(st.tuples(st.floats(0, 1), st.integers(0, 100)), min_size=1, max_size=6)


@given(st.lists(LOADS, min_size=1, max_size=40), st.floats(0.1, 2))
def test_moves_are_rare_and_lead_downhill(rounds: list[list[tuple[float, int]]], step_s: float) -> None:
    rebalancer, last = Rebalancer(LIMITS), None
    for number, loads in enumerate(rounds):
        views = [decode(f"d{index}", used, seqs) for index, (used, seqs) in enumerate(loads)]
        move = rebalancer.decide(views, {}, number * step_s)
        if move is not None:
            assert last is None or number * step_s - last >= LIMITS.period_s
            last = number * step_s
            by_key = {view.key: load_share(view) for view in views}
            assert by_key[move.source] - by_key[move.target] >= LIMITS.gap
