"""The interface of a routing policy, and the table of policies by the name that `--policy` takes.

A new policy is one module in `policies/` and one line in `POLICIES`: the router, the simulator and the choices of both their
`--policy` flags read that table. Policies are pure: a snapshot of the fleet and a clock reading go in, a decision with its
reason comes out. `pdmesh.simulator.compiled` compiles them together with this module.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from router.routing.cost_policy import PredictPolicy
from router.routing.filters import NoPlacement, Placement, RoutingRequest
from router.routing.fleet_snapshot import FleetSnapshot
from router.routing.learned import Overheads
from router.routing.policies.least_loaded import LeastLoaded
from router.routing.policies.prefix import Prefix
from router.routing.policies.round_robin import RoundRobin
from router.routing.policies.single_signal import SingleSignalPolicy
from router.routing.worker_snapshot import WorkerSnapshot


class Policy(Protocol):
    """Choose workers for requests. `now` is monotonic seconds."""

    name: str

    def choose(self, fleet_snapshot: FleetSnapshot, routing_request: RoutingRequest, now: float) -> Placement | NoPlacement:
        """Return the placement of one request."""

    def choose_prefill(
        self, fleet_snapshot: FleetSnapshot, decode: WorkerSnapshot, routing_request: RoutingRequest, now: float
    ) -> Placement | None:
        """Return another prefill worker for a request that has a reservation on `decode`, as a placement there; None without
        one."""

    def placed(self, decode: WorkerSnapshot, prefill: WorkerSnapshot | None) -> None:
        """Note that a request was sent to these workers."""


@dataclass(frozen=True)
class PolicyInputs:
    """Hold the inputs of a policy. `overheads` are learned while requests run. The decode worker prefills prompts with fewer than
    `local_prefill_tokens` uncached tokens itself."""

    overheads: Overheads
    local_prefill_tokens: int


PolicyFactory = Callable[[PolicyInputs], Policy]

POLICIES: dict[str, PolicyFactory] = {
    "predict": lambda inputs: PredictPolicy(inputs.overheads, local_prefill_tokens=inputs.local_prefill_tokens),
    "round-robin": lambda inputs: SingleSignalPolicy(RoundRobin(), inputs.local_prefill_tokens),
    "least-loaded": lambda inputs: SingleSignalPolicy(LeastLoaded(), inputs.local_prefill_tokens),
    "prefix": lambda inputs: SingleSignalPolicy(Prefix(), inputs.local_prefill_tokens),
}


def make_policy(name: str, overheads: Overheads, local_prefill_tokens: int) -> Policy:
    """Return a new policy by its name. Raises KeyError for a name that is not in `POLICIES`."""
    return POLICIES[name](PolicyInputs(overheads, local_prefill_tokens))
