"""CUDA graphs where there is no GPU: what is recorded are launches and operations, and no Python runs again but theirs.

    warm-up     the work runs as it is: what is made lazily is made now, and outlives the recording
    recording   operations of torch, launches of Triton and exchanges between ranks are kept with all that they are given;
                launches and exchanges are not made, as a capture computes nothing
    replay      the same calls, with the same grids, numbers and addresses

As on a GPU: scalars, grids and choices of kernels are those of the recording. Tensors are kept by where their memory lies. What
the recording allocates is its own (a graph's pool); what it found has to outlive it, or the replay raises. The recordings of one
recorder share one pool, so each replay first fills with 0xff (NaN in every format, -1 in integers) whatever it may overwrite: its
own memory, and that of all that were recorded after it, which may have been given what its temporaries had left.

Not as on a GPU: memory of the host is refused by name only (refused.py), and there is one stream.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only
from triton.runtime.interpreter import GridExecutor

from pdmesh.engine.kernels.triton import cuda_graphs
from pdmesh.engine.kernels.triton.cuda_graphs import Recording, Work
from tests.engine.kernels.triton.refused import NoHost, check_operation

POISON = 0xFF
_EXCHANGES = ("allreduce", "allgather", "gather")


class MemoryGone(RuntimeError):
    """What a recording reads or writes was freed behind it."""


def stand_in() -> None:
    """From now on `make_recorder` gives these where there is no GPU."""
    setattr(cuda_graphs, "Repeats", Frozen)  # noqa: B010  # a class of another interface than mypy sees there


class Frozen:
    """A `Recorder`; one pool of memory."""

    def __init__(self) -> None:
        self._tapes: list[_Tape] = []

    def record(self, work: Work) -> Recording:
        work()
        tape, index = _Tape(), len(self._tapes)
        with tape.recording():
            output = work()
        self._tapes.append(tape)

        def replay() -> None:
            for overwritten in self._tapes[index:]:
                overwritten.poison()
            tape.replay()

        replay()
        return Recording(output, replay)


class _Place:
    """A tensor by where it lies. Memory that is not the tape's own is not kept alive."""

    def __init__(self, tensor: Tensor, is_own: bool) -> None:
        self._kept = tensor if is_own or not torch._C._has_storage(tensor) else None  # packed weights have no storage
        self._storage = StorageWeakRef(tensor.untyped_storage()) if self._kept is None else None  # type: ignore[no-untyped-call]
        self._view = (tensor.storage_offset(), tensor.size(), tensor.stride()) if self._kept is None else None
        self._dtype = tensor.dtype

    def tensor(self) -> Tensor:
        """Raises MemoryGone."""
        if self._storage is None or self._view is None:
            assert self._kept is not None
            return self._kept
        storage = torch.UntypedStorage._new_with_weak_ptr(self._storage.cdata)
        if storage is None:
            raise MemoryGone(f"{self._dtype} {tuple(self._view[1])} was freed behind the recording")
        return torch.empty(0, dtype=self._dtype).set_(storage, *self._view)


class _Call:
    """A function with what it was given, tensors by their places, and where its results are."""

    def __init__(self, tape: _Tape, start: Callable[..., Any], args: Any, kwargs: Any, results: Sequence[Tensor] = ()) -> None:
        self._start, self._results = start, results
        self._args, self._kwargs = tree_map_only(Tensor, tape.place, (args, kwargs))

    def again(self) -> None:
        args, kwargs = tree_map_only(_Place, _Place.tensor, (self._args, self._kwargs))
        found = [x for x in tree_flatten(self._start(*args, **kwargs))[0] if isinstance(x, Tensor)]
        for kept, new in zip(self._results, found, strict=False):
            kept.copy_(new)


class _Tape(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """One recording. As a dispatch mode it is told of every operation of torch."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._calls: list[_Call] = []
        self._own: dict[int, torch.UntypedStorage] = {}  # by address of the storage
        self._thread = threading.get_ident()

    @contextmanager
    def recording(self) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(_replaced(GridExecutor, "__call__", self._launched))
            for name in _EXCHANGES:
                stack.enter_context(_replaced(dist.ProcessGroupGloo, name, partial(self._exchanged, name)))
            stack.enter_context(NoHost())
            stack.enter_context(self)
            yield

    @torch.inference_mode()
    def replay(self) -> None:
        for call in self._calls:
            call.again()

    def poison(self) -> None:
        for storage in self._own.values():
            torch.empty(0, dtype=torch.uint8).set_(storage).fill_(POISON)

    def place(self, tensor: Tensor) -> _Place:
        return _Place(tensor, torch._C._has_storage(tensor) and tensor.untyped_storage()._cdata in self._own)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name, given = func._schema.name.partition("::")[2], kwargs or {}
        check_operation(name, args)
        found = func(*args, **given)
        seen = {x.untyped_storage()._cdata for x in _stored((args, given))}
        fresh = [x for x in _stored(found) if x.untyped_storage()._cdata not in seen]
        self._own |= {x.untyped_storage()._cdata: x.untyped_storage() for x in fresh}
        allocates = name.startswith(("empty", "new_empty"))
        if func._schema.is_mutable or (fresh and not allocates):  # all others are views
            self._calls.append(_Call(self, func, args, given, () if func._schema.is_mutable else list(_stored(found))))
        return found

    def _launched(self, launch: Any, executor: GridExecutor, *args: Any, **kwargs: Any) -> None:
        if threading.get_ident() != self._thread:
            launch(executor, *args, **kwargs)
        elif callable(executor.grid):
            raise TypeError(f"{executor.fn.__name__}: give its grid in numbers")
        else:
            self._calls.append(_Call(self, partial(launch, executor), args, kwargs))

    def _exchanged(self, name: str, exchange: Any, group: Any, *args: Any) -> _Done:
        self._calls.append(_Call(self, lambda *given: exchange(group, *given).wait(), args, {}))
        return _Done()


class _Done:
    def wait(self) -> None: ...


@contextmanager
def _replaced(owner: type, name: str, told: Callable[..., Any]) -> Iterator[None]:
    """`told` is called with the method and what that is given."""
    method, is_inherited = getattr(owner, name), name not in vars(owner)
    setattr(owner, name, lambda *args, **kwargs: told(method, *args, **kwargs))
    try:
        yield
    finally:
        if is_inherited:
            delattr(owner, name)
        else:
            setattr(owner, name, method)


def _stored(tree: Any) -> Iterator[Tensor]:
    return (x for x in tree_flatten(tree)[0] if isinstance(x, Tensor) and torch._C._has_storage(x))
