"""Python runs this as it starts where this folder is on PYTHONPATH: the processes of other ranks get the interpreter as the tests
have it (test_parallel.py)."""

from __future__ import annotations

import os

if os.environ.get("TRITON_INTERPRET") == "1":
    from tests.engine.kernels.triton.interpreter import mend

    mend()
