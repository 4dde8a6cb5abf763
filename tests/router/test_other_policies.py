"""Policies that look at one thing, and what every policy keeps to, as a table: a snapshot in, a placement out."""

from dataclasses import replace

import pytest

from kvtransfer.layout import Layout
from router.routing.filters import NoPlacement, Placement, RoutingRequest, compatible
from router.routing.fleet_snapshot import FleetSnapshot
from router.routing.learned import Overheads
from router.routing.policy import POLICIES, make_policy
from router.routing.worker_snapshot import Mode, WorkerSnapshot
from tests.router import fleets
from tests.router.fleets import offers

SMALL = {"max_context": 2048, "max_num_seqs": 8, "num_total_blocks": 100, "latency": None, "max_num_batched_tokens": 0}


def worker(name: str, **fields: object) -> WorkerSnapshot:
    """One of little room that says nothing of its speed."""
    return fleets.worker(name, **{**SMALL, "num_free_blocks": 100, **fields})


def device_pair(**prefill: object) -> list[WorkerSnapshot]:
    """Two on GPUs of one host that have no other transport in common."""
    only = {"transports": offers("cuda_ipc")}
    return [worker("p0", **only, **prefill), worker("d0", **only)]


DEMAND = RoutingRequest(model="m", num_tokens=160, max_total_tokens=200)
P0, P1, D0, D1, BOTH = worker("p0"), worker("p1"), worker("d0"), worker("d1"), worker("pd")


LEAST_LOADED = make_policy("least-loaded", Overheads(), local_prefill_tokens=32)


def place(workers: list[WorkerSnapshot], **routing_request: object) -> tuple[str, str | None] | NoPlacement:
    choice = LEAST_LOADED.choose(FleetSnapshot(workers), replace(DEMAND, **routing_request), 0.0)  # type: ignore[arg-type]
    if isinstance(choice, NoPlacement):
        return choice
    assert choice.reason
    assert (choice.mode is Mode.LOCAL) == (choice.prefill is None)
    return choice.decode.worker_id, choice.prefill.worker_id if choice.prefill else None


@pytest.mark.parametrize(
    ("workers", "routing_request", "expected"),
    [
        ([P0, D0], {}, ("d0", "p0")),
        ([D0], {}, ("d0", None)),  # nobody to prefill
        ([BOTH], {}, ("pd", None)),  # no hand-off to oneself
        ([BOTH, P0], {}, ("pd", "p0")),
        ([P0, D0], {"num_tokens": 31}, ("d0", None)),  # too short to be worth a hand-off
        ([P0, D0], {"num_tokens": 32}, ("d0", "p0")),
        ([P0, D0], {"num_tokens": 31, "mode": Mode.REMOTE}, ("d0", "p0")),
        ([P0, D0], {"mode": Mode.LOCAL}, ("d0", None)),
        ([P0, D0], {"cached_tokens": {D0.key: 144}}, ("d0", None)),  # decode has nearly all of it
        ([P0, D0], {"cached_tokens": {D0.key: 160}}, ("d0", None)),
        ([P0, D0], {"cached_tokens": {D0.key: 128}}, ("d0", "p0")),
        ([P0, D0, D1], {"cached_tokens": {D1.key: 64}}, ("d1", "p0")),  # a prefix breaks the tie
        ([P0, D0, worker("d1", num_seqs=7)], {"cached_tokens": {D1.key: 64}}, ("d0", "p0")),  # but not against a full worker
        ([P0, P1, D0], {"cached_tokens": {P1.key: 64}}, ("d0", "p1")),
        ([P0, P1, D0, D1], {"session_workers": (D1.key, P1.key)}, ("d1", "p1")),  # among equals, where the session was
        ([P0, worker("p1", num_waiting_tokens=100), D0], {"session_workers": (D0.key, P1.key)}, ("d0", "p0")),
        ([P0, worker("p1", num_waiting_tokens=100), D0], {"cached_tokens": {P1.key: 64}}, ("d0", "p0")),
        ([worker("p0", dispatched_tokens=500), P1, D0], {}, ("d0", "p1")),
        ([P0, worker("d0", num_seqs=2), D1], {}, ("d1", "p0")),
        ([P0, worker("d0", dispatched_seqs=2), D1], {}, ("d1", "p0")),
        ([P0, worker("d0", num_free_blocks=50), D1], {}, ("d1", "p0")),
        ([P0, worker("d0", dispatched_blocks=50), D1], {}, ("d1", "p0")),
        ([P0, worker("d0", num_free_blocks=5), worker("d1", num_seqs=7)], {}, ("d1", "p0")),  # room first
        ([P0, worker("d0", num_free_blocks=5)], {}, ("d0", "p0")),  # the worker itself knows best
        ([P0, D0, D1], {"excluded_decode": frozenset({D0.key})}, ("d1", "p0")),
        ([P0, D0], {"excluded_prefill": frozenset({P0.key})}, ("d0", None)),
        ([worker("p0", identity=("m", "old")), D0], {}, ("d0", None)),
        ([worker("p0", layout=Layout(16, "float32", arrangement="panels")), D0], {}, ("d0", None)),
        ([P0, D0, worker("d1", identity=("m", "old"))], {"kind": (("m", "old"), "float32")}, ("d1", None)),
        ([worker("p0", model="x"), worker("d0", model="x"), D1], {}, ("d1", None)),
        ([worker("p0", host_id="there", transports=offers("shm")), D0], {}, ("d0", None)),  # shm does not reach
        ([worker("p0", transports=offers("shm")), D0], {}, ("d0", "p0")),
        (device_pair(), {}, ("d0", "p0")),
        (device_pair(host_id="there"), {}, ("d0", None)),
        (device_pair(layout=Layout(32, "float32")), {}, ("d0", None)),  # cuda_ipc converts nothing
        ([worker("p0", host_id="there"), D0], {}, ("d0", "p0")),  # tcp does
        ([worker("p0", host_id="there", transports=offers("grpc")), D1], {}, ("d1", None)),
        (
            [worker("p0", host_id="there", transports=offers("grpc")), worker("d0", transports=offers("tcp", "grpc"))],
            {},
            ("d0", "p0"),
        ),
    ],
)
def test_placement(workers: list[WorkerSnapshot], routing_request: dict[str, object], expected: tuple[str, str | None]) -> None:
    assert place(workers, **routing_request) == expected
    assert place(workers[::-1], **routing_request) == expected


@pytest.mark.parametrize(
    ("workers", "routing_request", "words", "never"),
    [
        ([], {}, "no decode worker", False),
        ([P0], {}, "no decode worker", False),
        ([P0, worker("d0", num_total_blocks=9)], {}, "exceed the KV pool", True),
        ([P0, worker("d0", max_context=199)], {}, "exceed the KV pool or context", True),
        ([P0, D0], {"num_choices": 9}, "", True),
        ([P0, D0], {"excluded_decode": frozenset({D0.key})}, "refused or were lost", False),
        ([D0], {"mode": Mode.REMOTE}, "REMOTE was asked for", False),
        ([P0, D0], {"kind": ("gone",)}, "no decode worker", False),
    ],
)
def test_no_placement(workers: list[WorkerSnapshot], routing_request: dict[str, object], words: str, never: bool) -> None:
    nothing = place(workers, **routing_request)
    assert isinstance(nothing, NoPlacement)
    assert words in nothing.reason
    assert nothing.never is never


def test_a_burst_spreads_when_dispatches_are_counted() -> None:
    workers = {name: worker(name) for name in ("p0", "p1", "d0", "d1")}
    placed: list[tuple[str, str]] = []
    for _ in range(8):
        choice = LEAST_LOADED.choose(FleetSnapshot(workers.values()), DEMAND, 0.0)
        assert isinstance(choice, Placement) and choice.prefill is not None
        for view, tokens in ((choice.decode, 0), (choice.prefill, 160)):
            workers[view.address] = replace(
                view, dispatched_seqs=view.dispatched_seqs + 1, dispatched_tokens=view.dispatched_tokens + tokens
            )
        placed.append((choice.decode.worker_id, choice.prefill.worker_id))
    assert sorted(decode for decode, _ in placed) == ["d0"] * 4 + ["d1"] * 4
    assert sorted(prefill for _, prefill in placed) == ["p0"] * 4 + ["p1"] * 4


def test_retry_takes_only_what_fits_the_reservation() -> None:
    foreign = worker("p1", identity=("m", "old"))
    routing_request = replace(DEMAND, excluded_prefill=frozenset({P0.key}))
    assert LEAST_LOADED.choose_prefill(FleetSnapshot([P0, foreign, D0]), D0, routing_request, 0.0) is None
    assert not compatible(foreign, D0)


def test_every_policy_says_the_name_that_it_is_listed_by() -> None:
    assert {name: make_policy(name, Overheads(), 32).name for name in POLICIES} == {name: name for name in POLICIES}
