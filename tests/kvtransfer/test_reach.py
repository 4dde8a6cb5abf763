"""What a transport reaches: between which workers it may be used, also where one of them does not say it."""

from itertools import product

import pytest

from kvtransfer.layout import EVERYWHERE, Reach, Scope, Transports
from kvtransfer.transports.registry import TRANSPORTS, defaults, transports_with
from pdmesh.v1 import worker_pb2

PROCESS, HOST, DEVICE = Reach(Scope.PROCESS), Reach(Scope.HOST), Reach(Scope.HOST, same_layout=True)
NEAR = {"same_process": True, "same_host": True, "same_layout": True}


def meet(ours: dict[str, Reach | None], theirs: dict[str, Reach | None], **distance: bool) -> bool:
    there, back = Transports.of(ours), Transports.of(theirs)
    found = there.meet(back, **{**NEAR, **distance})
    assert back.meet(there, **{**NEAR, **distance}) is found
    return found


@pytest.mark.parametrize(
    ("reach", "distance", "expected"),
    [
        (EVERYWHERE, {"same_process": False, "same_host": False, "same_layout": False}, True),
        (HOST, {"same_process": False, "same_layout": False}, True),
        (HOST, {"same_process": False, "same_host": False}, False),
        (DEVICE, {"same_process": False}, True),
        (DEVICE, {"same_process": False, "same_layout": False}, False),
        (PROCESS, {}, True),
        (PROCESS, {"same_process": False}, False),
    ],
)
def test_a_transport_is_used_within_its_reach(reach: Reach, distance: dict[str, bool], expected: bool) -> None:
    assert meet({"x": reach}, {"x": reach}, **distance) is expected
    assert meet({"x": reach, "y": EVERYWHERE}, {"x": reach}, **distance) is expected  # y is not common
    assert meet({"x": reach}, {"x": None}, **distance) is expected  # a worker of an older version: the other end's word counts
    assert meet({"x": reach}, {"x": EVERYWHERE}, **distance) is expected  # the narrower one


def test_nothing_in_common_is_no_pair() -> None:
    assert not meet({"x": EVERYWHERE}, {"y": EVERYWHERE})
    assert not meet({}, {})


@pytest.mark.parametrize("distance", product((False, True), repeat=3))
def test_two_workers_of_an_older_version_pair(distance: tuple[bool, bool, bool]) -> None:
    assert meet({"x": None}, {"x": None}, **dict(zip(NEAR, distance, strict=True)))


def test_what_reaches_all_is_known_at_a_glance() -> None:
    assert Transports.of({"x": HOST, "y": EVERYWHERE}).reach_all
    assert Transports.of({"x": None}).reach_all
    assert not Transports.of({"x": HOST, "y": Reach(Scope.EVERYWHERE, same_layout=True)}).reach_all


def test_scopes_are_those_of_the_wire() -> None:
    names = {f"REACH_SCOPE_{scope.name}": scope.value for scope in Scope}
    assert dict(worker_pb2.ReachScope.items()) == {"REACH_SCOPE_UNSPECIFIED": 0, **names}
    wire = worker_pb2.TransportReach(transport="x", scope=worker_pb2.REACH_SCOPE_HOST, same_layout=True)
    assert Reach.of(wire) == DEVICE
    assert Reach.of(worker_pb2.TransportReach(transport="x")) is None
    with pytest.raises(ValueError, match="7"):
        Reach.of(worker_pb2.TransportReach(transport="x", scope=7))  # type: ignore[arg-type]  # of a later version


def test_every_transport_says_what_it_reaches_under_the_name_that_it_is_listed_by() -> None:
    known = transports_with(None)
    assert {name: transport.name for name, transport in known.items()} == {name: name for name in TRANSPORTS}
    ours = {"cuda_ipc": DEVICE, "shm": HOST, "nixl": EVERYWHERE, "tcp": EVERYWHERE, "grpc": EVERYWHERE}
    assert {name: known[name].reach for name in ours} == ours  # a transport that is added later needs no line here
    assert [name for name in defaults() if name in ours] == ["cuda_ipc", "shm", "tcp", "grpc"]
