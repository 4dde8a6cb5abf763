"""Leave to use the AMX tiles of a CPU, which the system gives to processes that ask."""

from __future__ import annotations

import torch


def permit_amx() -> bool:
    """Ask the system for the use of AMX tiles, for this process; return whether it has it.

    vLLM 0.32's CPU kernels for quantized weights execute AMX instructions without asking, and Linux ends a process that does with
    SIGILL. In bfloat16 oneDNN asks before its first product."""
    ask = getattr(torch.cpu, "_init_amx", None)
    return bool(ask is not None and ask())
