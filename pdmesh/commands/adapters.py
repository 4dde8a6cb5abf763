"""`pdmesh adapters`: lists the LoRA adapters of a mesh, loads and unloads them while it runs."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from google.protobuf.json_format import MessageToJson

from pdmesh.adapter_id import check_adapter_name
from pdmesh.commands.options import Connection, flat
from pdmesh.terminal import show, table
from pdmesh.v1 import mesh_pb2


@dataclass(frozen=True)
class Options:
    """Adapters: pdmesh adapters list, pdmesh adapters load NAME FOLDER, pdmesh adapters unload NAME."""

    action: Literal["list", "load", "unload"] = field(
        default="list", metadata={"help": "what to do, also as a bare word", "positional": True}
    )
    name: str = field(default="", metadata={"help": "name that requests ask for, also as a bare word", "positional": True})
    folder: str = field(
        default="",
        metadata={"help": "load: folder that PEFT saved, as the workers see it, also as a bare word", "positional": True},
    )
    model: str = field(default="", metadata={"help": "model that it is for; empty while the mesh serves exactly one"})
    json: bool = field(default=False, metadata={"help": "write JSON"})
    connection: Connection = field(default_factory=Connection, metadata=flat())

    def validate(self) -> None:
        """Raise ValueError that names the field."""
        if self.action == "list":
            return
        try:
            check_adapter_name(self.name)
        except ValueError as error:
            raise ValueError(f"name: {error}") from error
        if self.action == "load" and not self.folder:
            raise ValueError(
                "folder: is missing; give the folder that PEFT saved, such as pdmesh adapters load sql ./sql-adapter"
            )


def run(options: Options) -> int:
    """Run the command; return 0 when all workers did what was asked, 1 when some did not."""
    if options.action == "list":
        return _list(options)
    with options.connection.client() as client:
        if options.action == "load":
            adapter = client.load_adapter(options.name, _folder(options), model=options.model, timeout=options.connection.timeout)
        else:
            adapter = client.unload_adapter(options.name, model=options.model, timeout=options.connection.timeout)
    if options.json:
        print(MessageToJson(adapter, always_print_fields_with_no_presence=True))
    else:
        _tell(options, adapter)
    return 1 if any(worker.error for worker in adapter.workers) else 0


def _folder(options: Options) -> str:
    """Return the folder for the workers: where there is one of that name here, its whole path."""
    here = Path(options.folder)
    return str(here.resolve()) if here.is_dir() else options.folder


def _tell(options: Options, adapter: mesh_pb2.MeshAdapter) -> None:
    done = "loaded on" if options.action == "load" else "unloaded on"
    workers = [worker.worker_id for worker in adapter.workers if not worker.error]
    print(f"{adapter.name} of {adapter.model}: {done} {', '.join(workers) or 'no worker'}")
    for worker in adapter.workers:
        if worker.error:
            print(f"{worker.worker_id}: {worker.error}", file=sys.stderr)
        if worker.num_running:
            print(f"{worker.worker_id}: {worker.num_running} requests with it go on to their end")


def _list(options: Options) -> int:
    with options.connection.client() as client:
        found = client.list_adapters(timeout=options.connection.timeout)
    if options.json:
        print(MessageToJson(found, always_print_fields_with_no_presence=True))
        return 0
    if not found.adapters:
        print("no adapters; load one with: pdmesh adapters load NAME FOLDER (workers need --max-loras 8)")
        return 0
    rows = [(a.name, a.model, a.digest[:12], _holders(a), a.folder or "given to the workers") for a in found.adapters]
    show(table(("ADAPTER", "MODEL", "DIGEST", "WORKERS", "FOLDER"), rows))
    return 0


def _holders(adapter: mesh_pb2.MeshAdapter) -> str:
    return f"{sum(worker.loaded for worker in adapter.workers)} of {len(adapter.workers)}"
