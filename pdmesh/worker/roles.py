"""The roles of a worker: which services take requests now."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeAlias

from pdmesh.runtime.errors import STOPPED, FailedPrecondition, InvalidArgument, Unavailable
from pdmesh.v1 import worker_pb2

Role: TypeAlias = "worker_pb2.Role.ValueType"
ServingState: TypeAlias = "worker_pb2.ServingState.ValueType"
ROLE_NAMES: dict[str, Role] = {"prefill": worker_pb2.ROLE_PREFILL, "decode": worker_pb2.ROLE_DECODE}
_NAME_OF = {role: name for name, role in ROLE_NAMES.items()}


class RoleGate:
    """Hold the roles, a set that can change while the worker runs; a worker that drains, is paused or sleeps takes no new
    requests at all."""

    def __init__(self, roles: Iterable[Role]) -> None:
        self._roles = self._home_roles = frozenset(roles)
        self.draining = False
        self.serving: ServingState = worker_pb2.SERVING_STATE_RUNNING
        self.gives_up = False  # also what requests that are here ask for is refused
        self.abort_id = 0  # routers end their requests of this model when it changes

    @property
    def roles(self) -> list[Role]:
        return sorted(self._roles)

    @property
    def home_roles(self) -> list[Role]:
        """Return the roles at the worker's start."""
        return sorted(self._home_roles)

    @property
    def is_running(self) -> bool:
        """Return whether the worker is neither paused nor asleep."""
        return self.serving == worker_pb2.SERVING_STATE_RUNNING

    def set(self, roles: Iterable[Role]) -> None:
        self._roles = check_roles(roles)

    def check(self, role: Role) -> None:
        """Raise Unavailable while it takes no new requests, FailedPrecondition when the role is off."""
        if self.draining:
            raise Unavailable("this worker is draining and takes no new work; choose another", retry_delay_s=0.1)
        if not self.is_running:
            raise Unavailable("this worker is paused or asleep; choose another, or wait", retry_delay_s=0.1, reason=STOPPED)
        if role not in self._roles:
            have = ", ".join(_NAME_OF[have] for have in self.roles)
            raise FailedPrecondition("roles", f"this worker has the roles {have}, not {_NAME_OF[role]}; choose another")

    def checker(self, role: Role) -> Callable[[], None]:
        """Return `check` for one service."""
        return lambda: self.check(role)


def check_roles(roles: Iterable[Role]) -> frozenset[Role]:
    """Return the roles as a set. Raises InvalidArgument for an empty set or an unknown role."""
    given = frozenset(roles)
    unknown = given - _NAME_OF.keys()
    if unknown:
        raise InvalidArgument("roles", f"{sorted(unknown)} unknown; give ROLE_PREFILL, ROLE_DECODE or both")
    if not given:
        raise InvalidArgument("roles", "none given; a worker has at least one")
    return given


def roles_of(names: Iterable[str]) -> frozenset[Role]:
    """Return the roles with these configuration names."""
    return frozenset(ROLE_NAMES[name] for name in names)
