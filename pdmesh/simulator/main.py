"""Runs the command and prints the results.

python -m pdmesh.simulator --speed SPEED.json --trace azure-conv=PATH --rate 2x --prefill 4 --decode 4
"""

import gc
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from pdmesh.autoscaler.settings import AutoscalerSettings
from pdmesh.runtime.config import load
from pdmesh.simulator import results as simulator_results
from pdmesh.simulator.arrivals import TraceError
from pdmesh.simulator.autoscaling import Autoscaled, OwnScaler, goals_of, reversals
from pdmesh.simulator.autoscaling_page import Shown, page
from pdmesh.simulator.config import SimulatorConfig
from pdmesh.simulator.mesh import Mesh
from pdmesh.simulator.results import Results
from pdmesh.simulator.workers.spec import SpecError, WorkerSpec, read_spec

EXIT_USAGE = 2


def simulate(config: SimulatorConfig, spec: WorkerSpec) -> tuple[Results, Mesh]:
    """Run the simulation. Raises TraceError."""
    results = Results(window_s=config.window_s)
    if config.autoscale == "on":
        return results, _autoscaled(config, spec, results).mesh
    mesh = Mesh(config.mesh(), results, prefix_tokens=spec.prefix_tokens, seed=config.seed)
    for count, prefill, decode in ((config.prefill, True, False), (config.decode, False, True), (config.both, True, True)):
        for _ in range(count):
            mesh.add_worker(spec, prefill=prefill, decode=decode)
    mesh.run(config.arrivals(spec.largest), config.until_s or None)
    return results, mesh


def _autoscaled(config: SimulatorConfig, spec: WorkerSpec, results: Results) -> Autoscaled:
    mesh, (settings, own) = config.mesh(), config.autoscaling()
    assert mesh.objective is not None
    scaler = OwnScaler(own, goals_of(mesh.objective))
    scaled = Autoscaled(mesh, results, dict.fromkeys(config.pools, spec), scaler, settings, seed=config.seed)
    scaled.start(config.pools)
    scaled.run(config.arrivals(spec.largest), config.until_s or None)
    if config.report:
        _write_page(config.report, scaled, results, own)
    return scaled


def _write_page(path: str, scaled: Autoscaled, results: Results, own: AutoscalerSettings) -> None:
    """Write the page. Raises ReportError."""
    num_reversals = reversals(scaled.moments, own.cool_down_s)
    summary = {
        "kept their objectives": f"{results.total.attainment:.2%} of {results.total.num_arrived}",
        "pod-seconds": f"{sum(scaled.mesh.pod_seconds().values()):.0f}",
        "reversals within a cool-down": str(num_reversals),
    }
    shown = Shown("the autoscaler's policy", summary, scaled.moments, results.windows, results.window_s)
    try:
        Path(path).write_text(page("A simulated mesh, autoscaled", [shown]), encoding="utf-8")
    except OSError as error:
        raise ReportError(f"report: {path}: {error.strerror}; name a file in a folder that is there") from error


class ReportError(Exception):
    """Raised when the page cannot be written: where, and why."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code."""
    try:
        config = load(SimulatorConfig, argv, os.environ, prog="simulator")
        spec = read_spec(config.speed)
        gc.freeze()  # existing objects stay, and new ones have no cycles: searching for cycles takes a tenth of the time
        gc.set_threshold(200_000, 20, 20)
        began_s = time.perf_counter()
        results, mesh = simulate(config, spec)
    except (SpecError, TraceError, ReportError) as error:
        print(f"simulator: {error}", file=sys.stderr)
        return EXIT_USAGE
    wall_s = time.perf_counter() - began_s
    if config.json:
        print(json.dumps(simulator_results.numbers(results, mesh.pod_seconds(), wall_s=wall_s)))
    else:
        print(simulator_results.text(results, mesh.pod_seconds(), wall_s=wall_s))
    return 0
