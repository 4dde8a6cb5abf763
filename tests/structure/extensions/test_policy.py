"""A routing policy is one module and one line of `router/routing/policy.py`: the flags, the router and the simulator know it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from pdmesh.runtime.config import ConfigError, parse
from pdmesh.simulator.arrivals import Arrival
from pdmesh.simulator.config import SimulatorConfig
from pdmesh.simulator.mesh import Mesh
from pdmesh.simulator.results import Results
from router.config import RouterConfig
from router.routing.filters import NoPlacement, Placement, RoutingRequest, can_decode, explain_no_candidate, same_kind
from router.routing.fleet_snapshot import FleetSnapshot
from router.routing.policy import POLICIES
from router.routing.worker_snapshot import WorkerSnapshot
from tests.router.mesh import expected, request, running_mesh, write_model
from tests.simulator.specs import LARGE

NAME = "last-worker"


class LastWorker:
    """LOCAL on the worker with the last name."""

    name = NAME

    def choose(self, fleet_snapshot: FleetSnapshot, routing_request: RoutingRequest, now: float) -> Placement | NoPlacement:
        kind = [worker for worker in fleet_snapshot.views() if same_kind(worker, routing_request)]
        decodes = [worker for worker in kind if can_decode(worker, routing_request)]
        if not decodes:
            return explain_no_candidate(kind, routing_request)
        return Placement(max(decodes, key=lambda worker: worker.worker_id), None, "LOCAL: the last worker")

    def choose_prefill(
        self, fleet_snapshot: FleetSnapshot, decode: WorkerSnapshot, routing_request: RoutingRequest, now: float
    ) -> Placement | None:
        return None

    def placed(self, decode: WorkerSnapshot, prefill: WorkerSnapshot | None) -> None:
        pass


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The one line of the registry."""
    monkeypatch.setitem(POLICIES, NAME, lambda inputs: LastWorker())
    yield


def test_an_unknown_policy_is_refused_and_the_known_ones_are_named() -> None:
    with pytest.raises(ConfigError, match=f"'{NAME}' is not known; give one of predict, round-robin"):
        parse(RouterConfig, ["--models=m=folder", f"--policy={NAME}"], {}, prog="router")


@pytest.mark.usefixtures("registered")
async def test_the_router_routes_by_it(tmp_path: Path) -> None:
    config = parse(RouterConfig, ["--models=m=folder", f"--policy={NAME}"], {}, prog="router")
    async with running_mesh(write_model(tmp_path), decode=3, policy=config.policy) as mesh:
        for _ in range(3):
            assert (await mesh.generate(request())).tokens() == expected(8)
        assert [len(mesh[name].submits) for name in ("d0", "d1", "d2")] == [0, 0, 3]
        assert mesh["p0"].prefills == []
        assert [decision.policy for decision in mesh.router.core.decisions.latest(3)] == [NAME] * 3


@pytest.mark.usefixtures("registered")
def test_the_simulator_routes_by_it() -> None:
    config = parse(
        SimulatorConfig,
        ["--speed=spec.json", "--rate=10/s", "--requests=10", "--both=3", f"--policy={NAME}"],
        {},
        prog="simulator",
    )
    results = Results(window_s=config.window_s)
    mesh = Mesh(config.mesh(), results)
    names = [mesh.add_worker(LARGE, prefill=True, decode=True) for _ in range(3)]
    mesh.run([Arrival(0.1 * number, 200, 20) for number in range(10)])
    generated = {name: figures.num_generated_tokens for name, figures in mesh.figures().items()}
    assert generated == {names[0]: 0, names[1]: 0, names[2]: 10 * 20}
