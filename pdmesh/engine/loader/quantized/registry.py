"""The formats of quantized weights by `quant_method`: a new one is a module and a line of FORMATS."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

from pdmesh.engine.loader.quantized.awq import read_awq
from pdmesh.engine.loader.quantized.bitsandbytes import read_bitsandbytes
from pdmesh.engine.loader.quantized.compressed_tensors import read_compressed_tensors
from pdmesh.engine.loader.quantized.format import WeightFormat
from pdmesh.engine.loader.quantized.fp8 import read_fbgemm, read_fp8
from pdmesh.engine.loader.quantized.gptq import read_gptq
from pdmesh.engine.loader.quantized.modelopt import read_modelopt
from pdmesh.engine.loader.quantized.mxfp4 import read_mxfp4
from pdmesh.engine.models.reader import ConfigReader, UnsupportedModel

FORMATS: dict[str, Callable[[ConfigReader], WeightFormat | None]] = {
    "awq": read_awq,
    "bitsandbytes": read_bitsandbytes,
    "compressed-tensors": read_compressed_tensors,
    "fbgemm_fp8": read_fbgemm,
    "fp8": read_fp8,
    "gptq": read_gptq,
    "modelopt": read_modelopt,
    "mxfp4": read_mxfp4,
}
SIDE_FILES = {"hf_quant_config.json": "modelopt", "quantize_config.json": "gptq"}
"""Files beside config.json that say how weights are quantized, where config.json does not."""
_KEYS = ("quantization_config", "compression_config")


def weight_format(content: Mapping[str, object]) -> WeightFormat | None:
    """Return how the weights of this config.json are stored; None: they are plain. Raises UnsupportedModel, naming the key, for
    what this engine does not read."""
    given = {key: content[key] for key in _KEYS if content.get(key)}
    if not given:
        return None
    key, value = next(iter(given.items()))
    if not isinstance(value, Mapping):
        raise UnsupportedModel(f"{key} is {value!r}, not a mapping")
    method = _method(key, value)
    if method not in FORMATS:
        known = ", ".join(FORMATS)
        raise UnsupportedModel(f"{key}: quant_method {method!r} is not supported; give plain weights, a GGUF, or one of {known}")
    return FORMATS[method](ConfigReader(value, f"{key}."))


def _method(key: str, value: Mapping[str, object]) -> str:
    default = "compressed-tensors" if key == "compression_config" or "config_groups" in value else None
    method = value.get("quant_method", default)
    if method is None and (value.get("load_in_4bit") or value.get("load_in_8bit")):
        return "bitsandbytes"  # before transformers 4.32 it did not say
    return "compressed-tensors" if method == "sparseml" else str(method)


def with_side_file(folder: Path, content: Mapping[str, object]) -> dict[str, object]:
    """Return the content of config.json with the quantization that another file of the folder describes. Raises ValueError naming
    the file."""
    if any(content.get(key) for key in _KEYS):
        return dict(content)
    for name, method in SIDE_FILES.items():
        path = folder / name
        if path.is_file():
            return {**content, "quantization_config": {"quant_method": method, **_mapping(path)}}
    return dict(content)


def _mapping(path: Path) -> dict[str, object]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path}: it holds no JSON object")
    return content
