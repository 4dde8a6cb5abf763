"""Without a GPU the kernels run in Triton's interpreter, which must be said before anything imports triton; without triton this
folder is skipped, each file by its name."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.engine.kernels.triton.interpreter import mend

HAS_TRITON = importlib.util.find_spec("triton") is not None
if not torch.cuda.is_available():
    if "triton" in sys.modules and "TRITON_INTERPRET" not in os.environ:
        raise pytest.UsageError("a test outside of this folder imports triton as it is collected; import it where it is needed")
    os.environ["TRITON_INTERPRET"] = "1"


if HAS_TRITON and "TRITON_INTERPRET" in os.environ:  # it changes how kernels are compiled, which a GPU must not see
    mend()


class _Skipped(pytest.Module):
    def collect(self) -> Iterator[pytest.Item]:
        pytest.skip("triton is not installed", allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    return None if HAS_TRITON else _Skipped.from_parent(parent, path=module_path)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents and item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
