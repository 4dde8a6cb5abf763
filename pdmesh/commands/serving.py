"""`pdmesh serving`: pauses the workers of a mesh, lets them sleep, and has them run again."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field

from google.protobuf.json_format import MessageToJson

from pdmesh.commands.options import Connection, flat
from pdmesh.v1 import mesh_pb2, worker_pb2

STATES = ("running", "paused", "asleep")


@dataclass(frozen=True)
class Options:
    """Pause a mesh, let it sleep, or have it run: pdmesh serving asleep. Requests wait meanwhile, and none is lost; with --abort
    they end with what they have."""

    state: str = field(
        default="",
        metadata={"help": "running, paused (no step), or asleep (memory given back), also as a bare word", "positional": True},
    )
    finish: float = field(
        default=0.0,
        metadata={
            "help": "seconds in which what runs may end first; 0: it stops where it is (paused), or goes on elsewhere or later"
        },
    )
    abort: bool = field(default=False, metadata={"help": "what runs or waits ends with the tokens that it has"})
    model: str = field(default="", metadata={"help": "model whose workers are meant; empty while the mesh serves exactly one"})
    json: bool = field(default=False, metadata={"help": "write JSON"})
    connection: Connection = field(default_factory=Connection, metadata=flat())

    def validate(self) -> None:
        """Raise ValueError that names the field."""
        if self.state not in STATES:
            raise ValueError(f"state: {self.state!r} is none of {', '.join(STATES)}; give one, such as pdmesh serving asleep")
        if not 0 <= self.finish <= 24 * 3600:
            raise ValueError("finish: must be between 0 and a day, in seconds")
        if self.abort and (self.finish or self.state == "running"):
            raise ValueError("abort: goes with paused or asleep, and not with finish; leave one out")


def run(options: Options) -> int:
    """Run the command; return 0 when all workers are in the state, 1 when some are not."""
    timeout = options.connection.timeout
    with options.connection.client() as client:
        done = client.set_serving(
            options.state,
            finish_running=options.finish > 0,
            finish_s=options.finish or 30.0,
            abort_running=options.abort,
            model=options.model,
            timeout=None if timeout is None else timeout + options.finish,
        )
    if options.json:
        print(MessageToJson(done, always_print_fields_with_no_presence=True))
    else:
        for worker in done.workers:
            print(_line(worker), file=sys.stderr if worker.error else sys.stdout)
    return 1 if any(worker.error for worker in done.workers) else 0


def _line(worker: mesh_pb2.WorkerServing) -> str:
    if worker.error:
        return f"{worker.worker_id}: {worker.error}"
    told = worker.serving
    text = f"{worker.worker_id}: {worker_pb2.ServingState.Name(told.state).removeprefix('SERVING_STATE_').lower()}"
    if told.freed_bytes:
        text += f", {told.freed_bytes / 2**20:.0f} MB of memory given back"
    return text + (f", {told.num_requests} requests stopped" if told.num_requests else "")
