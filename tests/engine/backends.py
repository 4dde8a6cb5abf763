"""Which backends can be tested here: the native one needs a compiler."""

from __future__ import annotations

import pytest

from pdmesh.engine.kernels.cpu.build import Compiler, NoCompiler


def why_no_native() -> str:
    """Empty where the native backend can be built."""
    try:
        Compiler.find()
    except NoCompiler as error:
        return str(error)
    return ""


needs_native = pytest.mark.skipif(bool(why_no_native()), reason=why_no_native() or "it is there")
BACKENDS = ("torch",) if why_no_native() else ("torch", "native")
