"""The native batch sampler: pdmesh/engine/sampling/sampler.py's Sampler in one C call (sampling.cpp) for all rows of a step.

The tokens are those of the torch Sampler, except where the two best scores differ by roundings only: the random bits are the
same, logarithms and exponentials may differ in the last place.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, float32

from pdmesh.engine.outputs import TokenLogprobs
from pdmesh.engine.sampling.sampler import NO_TOKEN, SampledToken, SampleRow, record_of, record_type
from pdmesh.sampling_params import SamplingParams

Int64s = NDArray[np.int64]

# PdmeshSamplingParams of sampling_params.h, which is made from the same description.
PARAMS = record_type("f8", "i8", align=True)
# PdmeshSampleRow of sampling.h, field by field.
ROW = np.dtype(
    [
        ("params", PARAMS), ("choice", np.int64), ("index", np.int64),
        ("prompt", np.uintp), ("output", np.uintp), ("forbidden", np.uintp), ("allowed", np.uintp),
        ("biased", np.uintp), ("bias", np.uintp),
        ("num_prompt", np.int64), ("num_output", np.int64), ("num_forbidden", np.int64), ("num_biased", np.int64),
        ("num_logprobs", np.int32), ("wants_logprobs", np.int32),
    ],
    align=True,
)  # fmt: skip
_MAX_REMEMBERED = 256  # requests; beyond that, parameters are packed anew in each step
_MOST = 2**31 - 1
_IS_PLAIN, _WANTS_LOGPROBS = attrgetter("is_plain"), attrgetter("wants_logprobs")


class _Output(ctypes.Structure):
    """PdmeshSampleOutput of sampling.h."""

    _fields_ = (
        ("tokens", ctypes.c_void_p),
        ("chosen", ctypes.c_void_p),
        ("top_ids", ctypes.c_void_p),
        ("top_logprobs", ctypes.c_void_p),
        ("top_counts", ctypes.c_void_p),
        ("stride", ctypes.c_int64),
    )


class _Plan:
    """Hold what of a row depends on its parameters only."""

    __slots__ = (
        "bias",
        "biased",
        "has_ends",
        "has_penalty",
        "has_repetition",
        "is_plain",
        "packed",
        "params",
        "points",
        "wants_logprobs",
    )

    def __init__(self, params: SamplingParams) -> None:
        self.params = params  # also keeps their id() from being another's
        self.has_repetition = params.penalizes_prompt
        self.has_penalty = self.has_repetition or params.penalizes_output
        self.has_ends = params.min_tokens > 0
        self.points = self.has_penalty or self.has_ends
        self.wants_logprobs = params.logprobs is not None
        self.is_plain = params.greedy and not self.points and not self.wants_logprobs and not params.logit_bias
        self.biased = _array([token for token, _ in params.logit_bias])
        self.bias = np.array([number for _, number in params.logit_bias], np.float32)
        self.packed = self._packed()

    def _packed(self) -> bytes:
        """Return a packed row without what changes from token to token; it points to arrays of this plan."""
        row, params = np.zeros(1, ROW), self.params
        row["params"] = record_of(params, PARAMS)
        row["wants_logprobs"], row["num_logprobs"] = self.wants_logprobs, min(params.logprobs or 0, _MOST)
        if len(self.biased):
            row["biased"], row["bias"] = self.biased.ctypes.data, self.bias.ctypes.data
            row["num_biased"] = len(self.biased)
        return row.tobytes()

    def point(self, packed: Any, row: SampleRow, prompts: _Prompts, alive: list[Int64s]) -> None:
        """Set what one packed row points to, and append the arrays to `alive`."""
        if self.has_penalty:
            _point(packed, "output", _array(row.output), alive)
        if self.has_repetition:
            _point(packed, "prompt", prompts.array(row.prompt), alive)
        if self.has_ends and row.forbidden:
            _point(packed, "forbidden", _array(tuple(row.forbidden)), alive)


class _Prompts:
    """Hold prompts as arrays. A request's prompt is the same tuple in every step."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Sequence[int], Int64s]] = {}

    def array(self, prompt: Sequence[int]) -> Int64s:
        if not isinstance(prompt, tuple):
            return _array(prompt)
        known = self._known.get(id(prompt))
        if known is None:
            if len(self._known) >= _MAX_REMEMBERED:
                self._known.clear()
            known = self._known[id(prompt)] = (prompt, _array(prompt))
        return known[1]


class _Tokens(dict[int, SampledToken]):
    """Map each id to a SampledToken without log-probabilities: made once, since they are values."""

    def __missing__(self, token_id: int) -> SampledToken:
        token = self[token_id] = SampledToken(token_id, None)
        return token


class NativeSampler:
    """Sample like Sampler, without state: between calls it keeps only parameters and prompts in packed form.

    One caller at a time. The threads wait between the calls (spinning for `spin_us` microseconds, then asleep) until `close()` or
    until the sampler is deleted. With `team`, the address of a pdmesh::Team that `owner` has, it has no threads of its own.
    """

    def __init__(
        self, library: ctypes.CDLL, num_threads: int = 1, *, spin_us: int = 50, team: int | None = None, owner: object = None
    ) -> None:
        """Start the threads. Raises ValueError for a number below 1, RuntimeError for a library of another version."""
        if num_threads < 1:
            raise ValueError(f"num_threads: {num_threads} is not allowed; it must be at least 1")
        _declare(library)
        if library.pdmesh_sample_row_bytes() != ROW.itemsize:
            raise RuntimeError(f"{library._name} is not of this version (PdmeshSampleRow differs); build the kernels anew")
        self._library, self.owner = library, owner
        self._team: int = library.pdmesh_team_create(num_threads, spin_us) if team is None else team
        if not self._team:
            raise MemoryError(f"num_threads: the system refuses {num_threads} threads; give fewer")
        owned = self._team if team is None else None
        self._finalizer = weakref.finalize(self, library.pdmesh_team_destroy, owned)  # of null it does nothing
        self._plans: dict[int, _Plan] = {}
        self._prompts = _Prompts()
        self._tokens = _Tokens()

    def close(self) -> None:
        """End the threads. The sampler is not used after it."""
        self._finalizer()

    def sample(self, logits: Tensor, rows: Sequence[SampleRow]) -> list[SampledToken]:
        """Sample logits [R, V] float32 on the CPU, contiguous, one SampleRow each -> R tokens. The logits are not changed.

        Raises ValueError for other logits.
        """
        _check(logits, rows)
        if not rows:
            return []
        plans = self._plans_of(rows)
        tokens = np.empty(len(rows), np.int64)
        if all(map(_IS_PLAIN, plans)) and not any(row.allowed is not None for row in rows):
            self._library.pdmesh_argmax(self._team, logits.data_ptr(), *logits.shape, tokens.ctypes.data)
        elif any(map(_WANTS_LOGPROBS, plans)):
            return self._sample_with_logprobs(logits, rows, plans, tokens)
        else:
            self._call(logits, rows, plans, _Output(tokens=tokens.ctypes.data))
        made = self._tokens
        return [made[token] for token in tokens.tolist()]

    def _sample_with_logprobs(
        self, logits: Tensor, rows: Sequence[SampleRow], plans: list[_Plan], tokens: Int64s
    ) -> list[SampledToken]:
        most = min(max(plan.params.logprobs or 0 for plan in plans), logits.shape[1])
        chosen, counts = np.empty(len(rows), np.float32), np.empty(len(rows), np.int32)
        ids, values = np.empty((len(rows), most), np.int64), np.empty((len(rows), most), np.float32)
        arrays = (tokens, chosen, ids, values, counts)
        self._call(logits, rows, plans, _Output(*(array.ctypes.data for array in arrays), most))
        sampled = []
        for i, plan in enumerate(plans):
            token = int(tokens[i])
            if not plan.wants_logprobs or token == NO_TOKEN:
                sampled.append(self._tokens[token])
                continue
            top = tuple(zip(ids[i, : counts[i]].tolist(), values[i, : counts[i]].tolist(), strict=True))
            sampled.append(SampledToken(token, TokenLogprobs((token, float(chosen[i])), top)))
        return sampled

    def _call(self, logits: Tensor, rows: Sequence[SampleRow], plans: list[_Plan], output: _Output) -> None:
        packed, _alive = self._pack(rows, plans)  # the arrays that rows point to live until the call is over
        if self._library.pdmesh_sample(self._team, logits.data_ptr(), *logits.shape, packed.ctypes.data, ctypes.byref(output)):
            raise MemoryError(f"no memory to sample from {logits.shape[1]} tokens a row")

    def _plans_of(self, rows: Sequence[SampleRow]) -> list[_Plan]:
        """Return the plans by identity: hashing the parameters by value would cost more than all the rest."""
        known = self._plans
        return [known.get(id(row.params)) or self._new_plan(row.params) for row in rows]

    def _new_plan(self, params: SamplingParams) -> _Plan:
        if len(self._plans) >= _MAX_REMEMBERED:
            self._plans.clear()
        plan = self._plans[id(params)] = _Plan(params)
        return plan

    def _pack(self, rows: Sequence[SampleRow], plans: list[_Plan]) -> tuple[NDArray[np.void], list[Int64s]]:
        """Return rows for the C call, and the arrays that they point to."""
        packed = np.frombuffer(bytearray(b"".join([plan.packed for plan in plans])), ROW)
        packed["choice"] = [row.choice for row in rows]
        packed["index"] = [row.index for row in rows]
        alive: list[Int64s] = []
        for i, plan in enumerate(plans):
            if plan.points:
                plan.point(packed[i], rows[i], self._prompts, alive)
            allowed = rows[i].allowed
            if allowed is not None:
                packed[i]["allowed"] = allowed.ctypes.data  # the row keeps it alive
        return packed, alive


def _array(token_ids: Sequence[int]) -> Int64s:
    return np.array(token_ids, np.int64)


def _point(row: Any, field: str, array: Int64s, alive: list[Int64s]) -> None:
    """Set `field` and its length in one packed row."""
    row[field], row[f"num_{field}"] = array.ctypes.data, len(array)
    alive.append(array)


def _check(logits: Tensor, rows: Sequence[SampleRow]) -> None:
    if logits.dtype is not float32 or logits.device.type != "cpu" or not logits.is_contiguous():
        given = f"{logits.dtype} on {logits.device} with strides {logits.stride()}"
        raise ValueError(f"logits: {given}; they must be contiguous float32 on the cpu")
    if logits.dim() != 2 or len(rows) != logits.shape[0]:
        raise ValueError(f"logits: shape {tuple(logits.shape)} for {len(rows)} rows; they must be [{len(rows)}, vocabulary]")
    if not 0 < logits.shape[1] <= _MOST:
        raise ValueError(f"logits: a vocabulary of {logits.shape[1]}; it must be 1 to {_MOST}")


def _declare(library: ctypes.CDLL) -> None:
    """Declare argument types: without them ctypes would cut pointers to 32 bits."""
    pointer, int64 = ctypes.c_void_p, ctypes.c_int64
    library.pdmesh_sample_row_bytes.restype = int64
    library.pdmesh_team_create.argtypes, library.pdmesh_team_create.restype = [ctypes.c_int32] * 2, pointer
    library.pdmesh_team_destroy.argtypes, library.pdmesh_team_destroy.restype = [pointer], None
    library.pdmesh_sample.argtypes, library.pdmesh_sample.restype = (
        [pointer, pointer, int64, int64, pointer, pointer],
        ctypes.c_int32,
    )
    library.pdmesh_argmax.argtypes, library.pdmesh_argmax.restype = [pointer, pointer, int64, int64, pointer], None
