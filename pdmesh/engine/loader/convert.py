"""GGUF to a Hugging Face folder: weights in float32 (exact) and a config.json that transformers loads; no tokenizer."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

from safetensors.torch import save_file

from pdmesh.engine.loader.gguf import GgufSource
from pdmesh.engine.loader.safetensors import SINGLE


def convert_gguf_weights(
    gguf_path: str | Path, out_folder: str | Path, progress: Callable[[float, str], None] = lambda _share, _text: None
) -> Path:
    """Writes config.json and model.safetensors to `out_folder` (created; files there are replaced) and returns it.

    Both appear whole or not at all, config.json last: a folder with a config.json is complete. Needs memory for the weights
    in float32. `progress` gets (share done, what is being done). Raises ValueError for a file that is not supported.
    """
    source, folder = GgufSource(Path(gguf_path)), Path(out_folder)
    folder.mkdir(parents=True, exist_ok=True)
    names = sorted(source.names())
    tensors = {}
    for index, name in enumerate(names):
        progress(0.8 * index / len(names), f"dequantizing {name}")
        tensors[name] = source.get(name)
    progress(0.8, f"writing {SINGLE}")
    partial = folder / f".{SINGLE}.partial"
    save_file(tensors, partial, metadata={"format": "pt"})
    os.replace(partial, folder / SINGLE)
    partial_config = folder / ".config.json.partial"
    partial_config.write_text(json.dumps(source.config_dict, indent=2) + "\n")
    os.replace(partial_config, folder / "config.json")
    progress(1.0, "converted")
    return folder
