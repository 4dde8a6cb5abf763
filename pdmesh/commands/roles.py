"""`pdmesh roles`: changes the roles of a worker while it runs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import grpc

from pdmesh.client.channel import open_channel
from pdmesh.commands.options import Connection, flat
from pdmesh.commands.status import role_names
from pdmesh.errors import FailedPrecondition, MeshError, NotFound, Unavailable, error_from_rpc
from pdmesh.runtime.rpc.mesh_secret import MeshSecretConfig, open_secret
from pdmesh.runtime.rpc.proof import proving
from pdmesh.runtime.rpc.tls import open_tls
from pdmesh.v1 import mesh_pb2, worker_pb2
from pdmesh.v1.worker_pb2_grpc import WorkerControlStub

# After the drain: abandoning the remaining work, and the round trip.
_MARGIN_S = 10.0


@dataclass(frozen=True)
class Options:
    """Change what a running worker does: pdmesh roles decode-0 prefill,decode. It lasts until the worker restarts."""

    worker: str = field(default="", metadata={"help": "id of the worker, as `pdmesh status` shows it", "positional": True})
    roles: tuple[Literal["prefill", "decode"], ...] = field(
        default=(), metadata={"help": "roles to have from now on, comma-separated", "positional": True}
    )
    drain_timeout_s: float = field(default=30.0, metadata={"help": "how long work of a role that is taken away may finish"})
    connection: Connection = field(default_factory=Connection, metadata=flat())
    mesh_secret: MeshSecretConfig = field(default_factory=MeshSecretConfig, metadata=flat())

    def validate(self) -> None:
        """Raise ValueError that names the field."""
        if not self.worker:
            raise ValueError("worker: is missing; name one, such as pdmesh roles decode-0 prefill,decode")
        if not self.roles:
            raise ValueError("roles: are missing; give prefill, decode or prefill,decode")
        if not 0.001 <= self.drain_timeout_s <= 86_400:
            raise ValueError("drain_timeout_s: must be between 0.001 and 86400 seconds")


def run(options: Options) -> int:
    """Run the command; return 0 when the worker has the roles, and its old work is done."""
    with options.connection.client() as client:
        status = client.status(timeout=options.connection.timeout)
    worker = find_worker(status.workers, options.worker)
    before = role_names(worker.load.roles or worker.info.roles)
    info = _set_roles(worker.info, options)
    print(f"{info.worker_id}: {before} -> {role_names(info.roles)}")
    if worker_pb2.ROLE_DECODE not in info.roles and not _others_decode(status.workers, info):
        print(f"no other worker decodes {info.identity.model or 'its model'} now: requests have to wait", file=sys.stderr)
    return 0


def find_worker(workers: Sequence[mesh_pb2.WorkerStatus], worker_id: str) -> mesh_pb2.WorkerStatus:
    """Return the living process of that id. Raises NotFound, which lists the ids, or FailedPrecondition."""
    found = [worker for worker in workers if worker.info.worker_id == worker_id]
    alive = [worker for worker in found if worker.alive]
    if len(alive) > 1:
        addresses = ", ".join(worker.info.address for worker in alive)
        raise FailedPrecondition(
            "worker", f"{len(alive)} living processes are called {worker_id!r} ({addresses}); name them apart"
        )
    if alive:
        return alive[0]
    if found:
        raise FailedPrecondition("worker", f"worker {worker_id!r} is lost: the router does not hear from it")
    known = ", ".join(sorted({worker.info.worker_id for worker in workers})) or "none"
    raise NotFound(f"no worker is called {worker_id!r}; there are: {known}")


def _set_roles(worker: worker_pb2.WorkerInfo, options: Options) -> worker_pb2.WorkerInfo:
    roles = [worker_pb2.Role.Value(f"ROLE_{name.upper()}") for name in options.roles]
    request = worker_pb2.SetRolesRequest(roles=roles, drain_timeout_ms=round(options.drain_timeout_s * 1000))
    timeout_s = options.connection.timeout or options.drain_timeout_s + _MARGIN_S
    with open_channel(worker.address, open_tls(options.connection.tls)) as opened:
        channel = proving(opened, open_secret(options.mesh_secret))
        control = WorkerControlStub(channel)
        try:
            answer = control.GetInfo(worker_pb2.GetInfoRequest(), timeout=timeout_s)
            if answer.epoch != worker.epoch:  # it restarted, or its address is another's now
                raise FailedPrecondition("worker", f"{worker.worker_id} has just restarted; try again")
            return control.SetRoles(request, timeout=timeout_s)
        except grpc.RpcError as error:
            raise _of_worker(error_from_rpc(error), worker) from None


def _of_worker(error: MeshError, worker: worker_pb2.WorkerInfo) -> MeshError:
    """Return `error` as one of the worker's: the router has answered."""
    if isinstance(error, Unavailable):
        return FailedPrecondition("worker", f"{worker.worker_id} cannot be reached at {worker.address}: {error.message}")
    error.message = f"{worker.worker_id} at {worker.address}: {error.message}"
    return error


def _others_decode(workers: Sequence[mesh_pb2.WorkerStatus], changed: worker_pb2.WorkerInfo) -> bool:
    return any(
        worker.alive
        and worker.info.epoch != changed.epoch
        and worker.info.identity.model == changed.identity.model
        and worker_pb2.ROLE_DECODE in (worker.load.roles or worker.info.roles)
        for worker in workers
    )
