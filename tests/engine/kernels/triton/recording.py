"""What Triton would compile, from the arguments of real launches, on a machine without a GPU.

The driver here says that it has a Hopper (or another) and no more. Every launch goes through Triton's own specialization of its
arguments, and where that asks for a new kernel, the request is kept: nothing is compiled, nothing launched. The driver stays, so
this wants a process of its own, one that does not interpret kernels (TRITON_INTERPRET).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime import driver

HOPPER = 90


class Variant(NamedTuple):
    """One kernel that is compiled."""

    kernel: Any
    signature: dict[str, str]
    constants: dict[Any, Any]
    attributes: dict[Any, Any]
    options: dict[str, Any]

    @property
    def name(self) -> str:
        return str(self.kernel.__name__)

    @property
    def sizes(self) -> dict[str, Any]:
        """Constants by the names of their arguments."""
        return {self.kernel.arg_names[path[0]]: value for path, value in self.constants.items()}

    def compiled(self, capability: int) -> Any:
        source = ASTSource(self.kernel, self.signature, constexprs=self.constants, attrs=self.attributes)
        return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=self.options)


class Recorder:
    """The hook that Triton asks before it compiles."""

    def __init__(self) -> None:
        self.variants: dict[str, Variant] = {}

    def __call__(self, *, key: str, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        options = {name: compile[name] for name in ("num_warps", "num_stages", "enable_fp_fusion")}
        variant = Variant(fn.jit_function, compile["signature"], compile["constants"], compile["configs"][0], options)
        self.variants.setdefault(f"{variant.name}{key}", variant)
        return True


@contextmanager
def recording(capability: int = HOPPER) -> Iterator[Recorder]:
    recorder = Recorder()
    driver.set_active(_Driver(capability))
    knobs.runtime.jit_cache_hook = recorder
    try:
        yield recorder
    finally:
        knobs.runtime.jit_cache_hook = None


class _Driver:
    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, 32)
        self.utils = SimpleNamespace()

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")
