"""The model files that contestants read: all made from the one published GGUF, in the cache, once.

$PDMESH_CACHE/peers/weights/NAME-bf16/      the converted folder rounded to bfloat16, for vLLM and transformers
$PDMESH_CACHE/peers/weights/NAME.Q8_0.gguf  for llama.cpp, by its own quantizer
"""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from benchmarks.peers.environments import (
    LLAMA_CPP,
    PeerError,
    Weights,
    child_environment,
    ensure_environment,
    last_line,
    peers_folder,
)
from pdmesh.models.catalogue import Progress, building, exclusive, publish
from pdmesh.models.registry import ensure_gguf_of, ensure_model


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
