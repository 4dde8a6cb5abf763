"""`benchmarks/gpu/run.sh`: one GPU in 8 minutes; correctness first, then what matters most, then the peers.

    python -m benchmarks.gpu [--only PART[,PART]] [--output FILE] [--limit SECONDS] [--device cpu --tiny]

Each part is a process with a time of its own (plan.py). What is known is in the file after each part, and the table is printed
also when the run is cut off. `--device cpu --tiny` runs the same code in Triton's interpreter, to see that it runs: its times
mean nothing. Only a run of all parts on a GPU writes `benchmarks/results/gpu.json` by itself.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from dataclasses import asdict, dataclass

from benchmarks.gpu.plan import parse_args

# What this machine lacks for a run, found out by its first CUDA call.


MODULES = ("torch", "triton", "transformers", "numpy", "safetensors")


@dataclass(frozen=True)
class Gpu:
    """What ran it."""

    name: str
    memory_gib: float
    multiprocessors: int
    capability: str
    driver: str
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
    versions = (_driver(), str(torch.version.cuda), str(triton.__version__), str(transformers.__version__))
    capability = f"{found.major}.{found.minor}"
    return asdict(Gpu(found.name, round(found.total_memory / 2**30, 1), found.multi_processor_count, capability, *versions))


def _driver() -> str:
    """Empty where nothing says it."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def main() -> int:
    """Exit status: 0, 1 (something is not equal, failed, or was left out), 3 (something is missing here)."""
    args = parse_args()
    if reason := why_not(args.device):  # before anything is imported that needs what is missing
        print(f"missing: {reason}", file=sys.stderr)
        return 3
    from benchmarks.gpu.command import run_parts

    return run_parts(args)


if __name__ == "__main__":
    sys.exit(main())
