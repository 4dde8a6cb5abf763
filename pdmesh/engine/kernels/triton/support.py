"""Whether the Triton kernels can be used here, without importing triton."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sysconfig
from pathlib import Path

from pdmesh.engine.kernels.triton.tiles import HOPPER_BYTES, MAX_HEAD_DIM, LatentTiles, choose_tiles, latent_columns
from pdmesh.engine.models.config import ExpertsConfig, LatentConfig, ModelConfig, missing_part

INTERPRET = "TRITON_INTERPRET"
FP8_CAPABILITY = (8, 9)
"""The least capability that converts numbers of 8 bits; weights in fp8 are unpacked by their bits, on any GPU."""


PARTS = frozenset(
    {
        "LayerNorm",
        "norms behind attention and MLP",
        "no norms before attention and MLP",
        "parallel attention and MLP",
        "QK norm with a weight for each head",
        "QK norm over all heads",
        "plain MLP",
        *(f"{activation} activation" for activation in ("gelu", "gelu_tanh", "relu", "relu2")),
        "experts",
        "two rotary embeddings",
        "partial rotary embedding",
        "layers without rotary embedding",
        "learned positions",
        "scaled attention",
        "softcap of attention",
        "attention sinks",
        "multiplier of embeddings",
        "multiplier of residuals",
        "multiplier of logits",
        "softcap of logits",
        "bias of logits",
        "latent attention",
    }
)
"""What the kernels compute besides a Llama's parts (pdmesh/engine/models/config.py)."""


SCORINGS = ("softmax", "softmax_topk", "sigmoid", "sparsemixer")
"""How the scores of experts are computed (experts/routing.py)."""


def why_not(config: ModelConfig, item_size: int = 2, room: int = HOPPER_BYTES) -> str | None:
    """Return which property of this model the kernels do not support; None when they support it all. `item_size`: bytes of an
    activation; `room`: shared memory that a program may have. Quantized products fit wherever attention does."""
    if (part := missing_part(config, PARTS)) is not None:
        return f"its kernels have no {part}"
    if config.latent is None and config.head_dim > MAX_HEAD_DIM:
        return f"head_dim {config.head_dim} is more than {MAX_HEAD_DIM}"
    if config.latent is not None and (reason := _why_no_latent(config.latent)):
        return reason
    try:
        if config.latent is not None:
            LatentTiles.of(config.latent.width, item_size, room)
        else:
            choose_tiles(config.head_dim, item_size, room)
    except ValueError as error:
        return str(error)
    if config.experts is not None and (part := _missing_of_experts(config.experts)) is not None:
        return f"its kernels have no {part}"
    if any(window is not None and window < 1 for window in config.windows):
        return "a sliding window of no tokens"
    return None


def _why_no_latent(latent: LatentConfig) -> str:
    """Return what of a latent the tiles do not take: its values end within the main columns of its second half."""
    main, _ = latent_columns(latent.width)
    if 0 < latent.kv_rank - latent.width // 2 <= main and latent.width // 2 > 16:
        return ""
    return f"its kernels have no tiles for latents of {latent.kv_rank} and {latent.rope_dim} numbers"


def _missing_of_experts(experts: ExpertsConfig) -> str | None:
    """Return what of a mixture of experts the kernels do not compute; None when they compute it all."""
    if experts.scoring not in SCORINGS:
        return f"{experts.scoring} scores of experts"
    return "scores that multiply what experts read" if experts.scales_input else None


def why_not_here(device: str) -> str:
    """Return what is missing on this machine, or empty. On a CPU the kernels run in Triton's interpreter alone, for tests."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    interprets = os.environ.get(INTERPRET) == "1"
    if device == "cuda":
        return f"{INTERPRET}=1 is set, which is for machines without a GPU" if interprets else _why_no_launches()
    return "" if interprets else f"on device={device} it runs in Triton's interpreter alone, for tests: {INTERPRET}=1 is not set"


def _why_no_launches() -> str:
    """Return what is missing to launch kernels: Triton compiles their launchers in C, the first time each is used."""
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None or shutil.which(compiler) is None:
        return f"Triton needs a C compiler, and there is no {compiler or 'gcc or clang'}; install gcc, or name one by CC"
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    return "" if header.exists() else f"Triton needs Python's headers, and there is no {header}; install python3-dev"


def why_no_fp8_kv(capability: tuple[int, int]) -> str:
    """Return why attention cannot read keys and values in fp8 on a GPU of this compute capability; empty where it can."""
    if capability >= FP8_CAPABILITY:
        return ""
    return f"fp8 needs a GPU of compute capability 8.9 (Ada, Hopper) or more, this has {capability[0]}.{capability[1]}; give auto"
