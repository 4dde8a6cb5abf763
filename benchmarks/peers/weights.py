"""The model files that contestants read, made in the cache once, each from the one published GGUF or from random weights.

$PDMESH_CACHE/peers/weights/NAME/                 random weights (`shapes`)
$PDMESH_CACHE/peers/weights/NAME-bf16/            a converted folder rounded to bfloat16, for vLLM and transformers
$PDMESH_CACHE/peers/weights/NAME.Q8_0.gguf        for llama.cpp, by its own quantizer (of random weights: by gguf's)
$PDMESH_CACHE/peers/weights/NAME.Q4_0.gguf        the same, by its own quantizer from Q8_0 where that was random weights; .Q4_1
$PDMESH_CACHE/peers/weights/NAME-openvino-int8/   OpenVINO's own format, by optimum-intel and nncf; -int4 with groups of 128
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from benchmarks.peers.environments import (
    LLAMA_CPP,
    OPENVINO_EXPORT,
    Environment,
    PeerError,
    Weights,
    child_environment,
    ensure_environment,
    last_line,
    peers_folder,
)
from benchmarks.peers.shapes import Shape
from pdmesh.models.catalogue import Progress, building, exclusive, publish
from pdmesh.models.registry import ensure_gguf_of, ensure_model

_CONVERSION_S = 1800.0


@dataclass(frozen=True)
class Subject:
    """A model that contestants run: a known one, by its name, or random weights in a shape."""

    name: str
    shape: Shape | None = None

    def folder(self, say: Progress) -> Path:
        """Return its Hugging Face folder: float32 of a known model, bfloat16 of random weights."""
        if self.shape is None:
            return ensure_model(self.name, say)
        target = peers_folder() / "weights" / self.shape.name
        with exclusive(target, say):
            if not target.exists():
                with building(target) as folder:
                    self.shape.write(folder, say)
                    publish(folder, target)
        return target


def random(shape: Shape) -> Subject:
    """Return the subject of a shape."""
    return Subject(shape.name, shape)


def ensure_weights(subject: Subject, weights: Weights, say: Progress) -> Path:
    """Return the folder or file of a model in the format that a contestant reads. Raises PeerError that says why it cannot be
    had."""
    if weights == "checkpoint" or (weights == "bfloat16" and subject.shape is not None):
        return subject.folder(say)
    if weights == "published":
        return ensure_gguf_of(subject.name, say)
    suffix = {"bfloat16": "-bf16", "q8_0": ".Q8_0.gguf", "q4_0": ".Q4_0.gguf", "q4_1": ".Q4_1.gguf"}.get(weights, f"-{weights}")
    target = peers_folder() / "weights" / f"{subject.name}{suffix}"
    source = _source(subject, weights, say)
    with exclusive(target, say):
        if not target.exists():
            say(f"making {target.name} in the cache, once")
            _make(source, weights, target, say)
    return target


def _source(subject: Subject, weights: Weights, say: Progress) -> Path:
    """Return what a format is made from."""
    if weights == "bfloat16":
        return subject.folder(say)
    if weights.startswith("openvino"):
        return ensure_weights(subject, "bfloat16", say)
    if subject.shape is None:
        return ensure_gguf_of(subject.name, say)
    return subject.folder(say) if weights == "q8_0" else ensure_weights(subject, "q8_0", say)


def _make(source: Path, weights: Weights, target: Path, say: Progress) -> None:
    with building(target) as folder:
        made, log = folder / target.name, folder / "log"
        if weights == "bfloat16":
            _round_to_bfloat16(source, made)
        elif weights.startswith("openvino"):
            _convert(OPENVINO_EXPORT, "openvino_export", [source, made, weights[-1]], made, log, say)
        elif source.is_dir():
            from tests.support.gguf_export import Q8_0, export  # transformers, which takes a second

            export(source, made, kind=Q8_0)
        else:
            _convert(LLAMA_CPP, "llama", [source, made, weights], made, log, say)
        publish(made, target)


def _round_to_bfloat16(source: Path, target: Path) -> None:
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("*.safetensors", "pdmesh.json"))
    for file in source.glob("*.safetensors"):
        tensors = {key: tensor.to(torch.bfloat16) for key, tensor in load_file(file).items()}
        save_file(tensors, target / file.name, metadata={"format": "pt"})
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, "torch_dtype": "bfloat16"}, indent=2))


def _convert(environment: Environment, module: str, arguments: Sequence[object], made: Path, log: Path, say: Progress) -> None:
    """Run a converter of a peer's under its own Python. Raises PeerError with its last words."""
    command = [str(ensure_environment(environment, say)), "-m", f"benchmarks.peers.{module}", *map(str, arguments)]
    with log.open("wb") as output:
        env = child_environment()
        try:
            done = subprocess.run(command, stdout=output, stderr=output, env=env, timeout=_CONVERSION_S, check=False)
        except subprocess.TimeoutExpired as error:
            raise PeerError(f"{environment.name} had not converted the weights after {_CONVERSION_S:g} s") from error
    if done.returncode or not made.exists():
        raise PeerError(f"{environment.name} made no {made.name}: {last_line(log)}")
