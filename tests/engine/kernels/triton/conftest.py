"""Without a GPU the kernels run in Triton's interpreter, which must be said before anything imports triton; without triton this
folder is skipped, each file by its name."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

HAS_TRITON = importlib.util.find_spec("triton") is not None
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


def _scalars_as_indices() -> None:
    """The interpreter of triton 3.6 keeps scalars as arrays of one element, which numpy from 2.4 on takes for no int."""
    from triton.runtime import interpreter

    before = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        before(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patched


def _patch_once_a_launch() -> None:
    """The interpreter replaces the language's functions again at every call of one kernel function by another, which takes most
    of its time; once for a launch and module is enough."""
    import triton.language as tl
    from triton.runtime import interpreter

    before, launch, done = interpreter._patch_lang, interpreter.GridExecutor.__call__, set[frozenset[int]]()

    def patched(fn: Any) -> Any:
        langs = frozenset(id(value) for value in fn.__globals__.values() if value is tl or value is tl.core)
        if langs in done:
            return interpreter._LangPatchScope()
        done.add(langs)
        return before(fn)

    def launched(self: Any, *args: Any, **kwargs: Any) -> None:
        done.clear()
        launch(self, *args, **kwargs)

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = patched, launched


if HAS_TRITON:
    _scalars_as_indices()
    _patch_once_a_launch()


class _Skipped(pytest.Module):
    def collect(self) -> Iterator[pytest.Item]:
        pytest.skip("triton is not installed", allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    return None if HAS_TRITON else _Skipped.from_parent(parent, path=module_path)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents and item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
