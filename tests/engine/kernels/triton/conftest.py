"""Kernels run on the GPU where there is one, else in Triton's interpreter; without Triton this folder is skipped."""

from __future__ import annotations

import os
from importlib.util import find_spec

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

collect_ignore_glob = [] if find_spec("triton") else ["test_*.py"]
