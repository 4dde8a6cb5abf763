"""NVIDIA ModelOpt, by its hf_quant_config.json or the same content as a quantization_config: fp8 with a scale for each tensor."""

from __future__ import annotations

from pdmesh.engine.loader.quantized.format import finish
from pdmesh.engine.loader.quantized.fp8 import Fp8
from pdmesh.engine.models.reader import ConfigReader, UnsupportedModel


def read_modelopt(config: ConfigReader) -> Fp8 | None:
    """Read the settings, which stand under `quantization` in some versions. Raises UnsupportedModel naming the algorithm."""
    inner = config.section("quantization") or config
    algorithm = inner.get("quant_algo")
    config.ignore("producer", "config_groups", "ignore", "kv_cache_scheme")
    inner.ignore("kv_cache_quant_algo", "exclude_modules", "group_size")
    if algorithm is not None and str(algorithm).upper() not in ("FP8", "FP8_PER_CHANNEL_PER_TOKEN"):
        raise UnsupportedModel(f"{inner.name('quant_algo')} {algorithm!r} of ModelOpt is not supported; this engine reads FP8")
    finish(config)
    return None if algorithm is None else Fp8("ModelOpt's")
