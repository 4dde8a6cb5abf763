"""`make bench-observability`: all parts, or those that `--only` names. Each adds its figures to those of the others in
benchmarks/results/observability.json as soon as it is through. The machine should have nothing else to do.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from pathlib import Path

from benchmarks import parts
from benchmarks.harness import RESULTS, Figure, say
from benchmarks.observability import delays, overhead, spans
from benchmarks.observability import parts as adding_up
from benchmarks.router.options import MODEL, Options
from benchmarks.router.results import save_to
from pdmesh.client.client import AsyncClient
from pdmesh.launcher.plan import LocalMeshConfig
from pdmesh.models.registry import ensure_model
from tests.support.traced_mesh import Traced, traced_mesh

PATH = RESULTS / "observability.json"
PARTS = ("overhead", "parts", "delays", "spans")


async def _figures(name: str, options: Options) -> list[Figure]:
    if name == "overhead":
        return await overhead.figures(options)
    config = LocalMeshConfig(model=str(options.model), model_name=MODEL, port=0, worker_args=("--kv-memory-mb", "512"))
    with tempfile.TemporaryDirectory() as folder:
        async with traced_mesh(config, Path(folder)) as traced, AsyncClient(traced.mesh.router_addresses) as client:
            return await _of_traces(name, options, traced, client)


async def _of_traces(name: str, options: Options, traced: Traced, client: AsyncClient) -> list[Figure]:
    await adding_up.under_load(traced, client, adding_up.AT_ONCE)  # whoever is asked for the first time takes longer
    if name == "parts":
        answered = await adding_up.under_load(traced, client, 16 if options.quick else 200)
        return adding_up.figures([trace for _, trace in answered])
    if name == "delays":
        return await delays.figures(traced, client, 3 if options.quick else 11)
    return await spans.figures(traced, client, 4 if options.quick else 40)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.observability", description=__doc__)
    parser.add_argument("--only", default="", help=f"of {','.join(PARTS)}")
    parser.add_argument("--quick", action="store_true", help="to see that all work, in short; no results are written")
    arguments = parser.parse_args()
    try:
        names = parts.chosen(arguments.only, PARTS)
    except ValueError as error:
        parser.error(str(error))
    options = Options(ensure_model(MODEL, say), arguments.quick)
    try:
        failed = parts.run(names, lambda name: _figures(name, options), _forget if options.quick else _save)
    except (asyncio.CancelledError, KeyboardInterrupt):
        say("interrupted")
        sys.exit(130)
    sys.exit(parts.told(failed))


def _save(part: str, figures: list[Figure]) -> None:
    save_to(PATH, {"command": "make bench-observability", "model": MODEL}, part, figures)


def _forget(part: str, figures: list[Figure]) -> None:
    """Of a quick run."""


if __name__ == "__main__":
    main()
