"""What this machine lacks for a run, found out by its first CUDA call."""

from __future__ import annotations

import importlib.util
from dataclasses import asdict, dataclass

MODULES = ("torch", "triton", "transformers", "numpy", "safetensors")


@dataclass(frozen=True)
class Gpu:
    """What ran it."""

    name: str
    memory_gib: float
    multiprocessors: int
    capability: str
    cuda: str
    triton: str
    transformers: str


def missing_modules() -> list[str]:
    return [name for name in MODULES if importlib.util.find_spec(name) is None]


def why_not(device: str) -> str:
    """In one line; empty where nothing is missing."""
    if names := missing_modules():
        return f"{', '.join(names)} (of Python packages); give PYTHON= one that has them"
    if device == "cpu":
        return ""
    from pdmesh.engine.kernels.triton.support import why_not_here

    return _why_no_cuda() or why_not_here(device)


def _why_no_cuda() -> str:
    import torch

    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (RuntimeError, AssertionError) as error:
        return f"a CUDA device; torch {torch.__version__} says: {' '.join(str(error).split())[:200]}"
    return ""


def describe_gpu() -> dict[str, object]:
    import torch
    import transformers
    import triton

    found = torch.cuda.get_device_properties(0)
    versions = (str(torch.version.cuda), str(triton.__version__), str(transformers.__version__))
    capability = f"{found.major}.{found.minor}"
    return asdict(Gpu(found.name, round(found.total_memory / 2**30, 1), found.multi_processor_count, capability, *versions))
