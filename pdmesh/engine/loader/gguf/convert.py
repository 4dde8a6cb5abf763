"""A GGUF file as a folder: weights in float32 (exact) and a config.json; no tokenizer."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

from safetensors.torch import save_file

from pdmesh.engine.loader.gguf.check import check_gguf
from pdmesh.engine.loader.gguf.source import GgufSource
from pdmesh.engine.loader.safetensors import CANONICAL, SINGLE

_CLASSES = {
    "llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM",
}  # fmt: skip
"""The families whose own names are the canonical ones: other programs can read their folders, too."""


def convert_gguf_weights(
    gguf_path: str | Path, out_folder: str | Path, progress: Callable[[float, str], None] = lambda _share, _text: None
) -> Path:
    """Write config.json and model.safetensors to `out_folder` (created; files there are replaced) and return it.

    Both appear whole or not at all, config.json last: a folder with a config.json is complete. Tensors have their canonical names
    (pdmesh/engine/models/names.py), and the file says so. Needs memory for the weights in float32. `progress` gets (share done,
    description). Raises ValueError for a file that is not supported."""
    source, folder = GgufSource(Path(gguf_path)), Path(out_folder)
    folder.mkdir(parents=True, exist_ok=True)
    names = sorted(set(check_gguf(source)))
    tensors = {}
    for index, name in enumerate(names):
        progress(0.8 * index / len(names), f"dequantizing {name}")
        tensors[name] = source.get(name).contiguous()
    progress(0.8, f"writing {SINGLE}")
    partial = folder / f".{SINGLE}.partial"
    save_file(tensors, partial, metadata={"format": "pt", **CANONICAL})
    os.replace(partial, folder / SINGLE)
    partial_config = folder / ".config.json.partial"
    kind = str(source.config_dict["model_type"])
    classes = {"architectures": [_CLASSES[kind]]} if kind in _CLASSES else {}
    partial_config.write_text(json.dumps({**classes, **source.config_dict}, indent=2) + "\n")
    os.replace(partial_config, folder / "config.json")
    progress(1.0, "converted")
    return folder
