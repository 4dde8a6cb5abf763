"""`make bench-observability`: all parts, or those that `--only` names. Each adds its figures to those of the others in
benchmarks/results/observability.json as soon as it is through. The machine should have nothing else to do.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from benchmarks.harness import MODEL, Figure, Options, Suite
from benchmarks.observability import overhead
from pdmesh.client.client import AsyncClient
from pdmesh.launcher.plan import LocalMeshConfig
from tests.support import trace_figures
from tests.support.traced_mesh import Traced, traced_mesh

SUITE = Suite("observability", ("overhead", "parts", "delays", "spans"), {"model": MODEL})


async def _figures(name: str, options: Options) -> list[Figure]:
    if name == "overhead":
        return await overhead.figures(options)
    config = LocalMeshConfig(model=str(options.model), model_name=MODEL, port=0, worker_args=("--kv-memory-mb", "512"))
    with tempfile.TemporaryDirectory() as folder:
        async with traced_mesh(config, Path(folder)) as traced, AsyncClient(traced.mesh.router_addresses) as client:
            return await _of_traces(name, options, traced, client)


async def _of_traces(name: str, options: Options, traced: Traced, client: AsyncClient) -> list[Figure]:
    await trace_figures.under_load(traced, client, trace_figures.AT_ONCE)  # whoever is asked for the first time takes longer
    if name == "parts":
        answered = await trace_figures.under_load(traced, client, 16 if options.quick else 200)
        return trace_figures.parts_figures([trace for _, trace in answered])
    if name == "delays":
        return await trace_figures.delay_figures(traced, client, 3 if options.quick else 11)
    return await trace_figures.figures(traced, client, 4 if options.quick else 40)


def main() -> None:
    parser = SUITE.parser(__doc__)
    arguments, names = SUITE.arguments(parser)
    options = Options("observability", arguments.quick)
    SUITE.main(names, lambda name: _figures(name, options), quick=options.quick)


if __name__ == "__main__":
    main()
