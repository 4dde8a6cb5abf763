"""`pdmesh weights`: has the workers of a mesh compute with other weights of the same model, while they serve."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path

from google.protobuf.json_format import MessageToJson

from pdmesh.commands.options import Connection, flat


@dataclass(frozen=True)
class Options:
    """Serve other weights of the same model: pdmesh weights FOLDER. Requests end on the weights that they began with."""

    folder: str = field(
        default="", metadata={"help": "folder or .gguf file, as the workers see it, also as a bare word", "positional": True}
    )
    model: str = field(default="", metadata={"help": "model that it is of; empty while the mesh serves exactly one"})
    send: bool = field(
        default=False, metadata={"help": "send the folder's .safetensors files to the workers, which need not see the folder"}
    )
    json: bool = field(default=False, metadata={"help": "write JSON"})
    connection: Connection = field(default_factory=Connection, metadata=flat())

    def validate(self) -> None:
        """Raise ValueError that names the field."""
        if not self.folder:
            raise ValueError("folder: is missing; give that of the weights, such as pdmesh weights ./step-200")


def run(options: Options) -> int:
    """Run the command; return 0 when all workers have the weights, 1 when some have not."""
    here, timeout = Path(options.folder), options.connection.timeout
    with options.connection.client() as client:
        if options.send:
            done = client.send_weights(here, model=options.model, timeout=timeout)
        else:
            folder = str(here.resolve()) if here.exists() else options.folder
            done = client.update_weights(folder, model=options.model, timeout=timeout)
    if options.json:
        print(MessageToJson(done, always_print_fields_with_no_presence=True))
    else:
        for worker in done.workers:
            if worker.error:
                print(f"{worker.worker_id}: {worker.error}", file=sys.stderr)
            else:
                print(f"{worker.worker_id}: {worker.weights_hash[:12]}, no step for {worker.pause_s * 1000:.1f} ms")
    return 1 if any(worker.error for worker in done.workers) else 0
