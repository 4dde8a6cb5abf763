"""What Triton's interpreter needs here before a kernel runs in it."""

from __future__ import annotations

from typing import Any

from tests.engine.kernels.triton import interpreter_costs


def mend() -> None:
    """Imports triton: `TRITON_INTERPRET=1` must be set before."""
    _scalars_as_indices()
    _patch_once_a_launch()
    interpreter_costs.lower()
    _stand_in_for_graphs()


def _stand_in_for_graphs() -> None:
    from tests.engine.kernels.triton.frozen import stand_in

    stand_in()


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
