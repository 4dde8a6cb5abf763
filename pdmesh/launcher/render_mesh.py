"""A running local mesh as text."""

from __future__ import annotations

from pdmesh.launcher.mesh import LocalMesh
from pdmesh.terminal import Palette, table


def process_table(mesh: LocalMesh, colours: Palette) -> list[str]:
    """What runs where."""
    consoles = () if mesh.console is None else (mesh.console,)
    rows = [(m.name, ",".join(m.roles), str(m.pid), m.address) for m in (*mesh.routers, *mesh.workers, *consoles)]
    if mesh.redis_pid is not None:
        rows.append(("redis", "registry", str(mesh.redis_pid), mesh.redis_url.removeprefix("redis://")))
    head, *lines = table(("PROCESS", "ROLES", "PID", "ADDRESS"), rows)
    return [colours.bold(head), *lines]
