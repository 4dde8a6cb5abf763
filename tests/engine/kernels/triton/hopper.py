"""Compiles kernels for Hopper (sm_90) on a machine without a GPU: `python -m tests.engine.kernels.triton.hopper`.

One line of JSON a kernel. The interpreter takes Python that the compiler refuses, and says nothing of registers. Needs Triton
with its ptxas, and must be a process of its own: in one that interprets kernels there is nothing to compile.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from engine.kernels.triton import gated, norms, sampling_kernels, weight_kernels

HOPPER = GPUTarget("cuda", 90, 32)
_FLOATS = {"eps"}  # arguments; others that are neither constants nor pointers are integers


class Case(NamedTuple):
    kernel: Any
    pointers: dict[str, str]  # types of what is pointed to
    constants: dict[str, Any]
    options: dict[str, Any]

    @property
    def signature(self) -> dict[str, str]:
        return {name: self._type(name) for name in self.kernel.arg_names}

    def _type(self, name: str) -> str:
        if name in self.constants:
            return "constexpr"
        if name in self.pointers:
            return "*" + self.pointers[name]
        return "fp32" if name in _FLOATS else "i32"

    def compiled(self) -> Any:
        names = self.kernel.arg_names
        plain = self.constants.keys() | _FLOATS
        aligned = {(names.index(name),): [["tt.divisibility", 16]] for name in names if name not in plain}
        source = ASTSource(self.kernel, self.signature, constexprs=self.constants, attrs=aligned)
        return triton.compile(source, target=HOPPER, options=self.options)


def cases() -> Iterator[Case]:
    yield from _products()
    yield from _rows()
    yield from _draws()


def _products() -> Iterator[Case]:
    for bits, span, fp8 in ((4, 32, False), (4, 128, False), (8, 128, False), (8, 128, True)):
        types = {"x": "bf16", "words": "i32", "scales": "i32" if bits == 4 else "fp32", "out": "bf16"}
        format_ = {"BITS": bits, "SPAN": span, "FP8": fp8}
        whole = {**types, "bias": "bf16", "partials": "fp32", "arrivals": "i32"}
        shares = {**format_, "SPLITS": 8, "TILES": 2, "HAS_BIAS": True}
        for rows in (1, 4) if bits == 4 else (1, 8):
            yield Case(weight_kernels.vector_kernel, whole, {**shares, "ROWS": rows}, {"num_warps": 4})
        for block in (16, 128):
            yield Case(weight_kernels.tile_kernel, whole, {**shares, "BLOCK_M": block}, {"num_warps": 4})
        yield Case(weight_kernels.expand_kernel, types, {**format_, "RAW": False}, {"num_warps": 4})


def _rows() -> Iterator[Case]:
    types = dict.fromkeys(("x", "residual", "weight", "out", "residual_out", "gate_up"), "bf16")
    for adds in (False, True):
        yield Case(norms._norm_kernel, types, {"ADDS": adds, "BLOCK": 8192}, {"num_warps": 8})
    yield Case(gated._silu_mul_kernel, types, {"BLOCK": 1024}, {"num_warps": 4})


def _draws() -> Iterator[Case]:
    floats = ("logits", "adjusted", "best_values", "score_values", "packed", "sums", "temperatures", "top_ps", "floors", "min_ps")
    ints = ("best_ids", "score_ids", "packed_ids", "counts", "count_rows", "masks", "mask_rows", "forbidden", "top_ks", "choices")
    types = {
        **dict.fromkeys((*floats, "repetitions", "presences", "frequencies"), "fp32"),
        **dict.fromkeys((*ints, "indices", "tokens"), "i32"),
        **dict.fromkeys(("int_limits", "seeds"), "i64"),
    }
    whole = {"VOCAB": 128_256, "CHUNK": 4096}
    sizes = {"NUM_CHUNKS": 32, "CHUNKS": 32}
    exact = {"enable_fp_fusion": False}
    yield Case(sampling_kernels.adjust_kernel, types, {**whole, "NUM_FORBIDDEN": 2}, {"num_warps": 8, **exact})
    yield Case(sampling_kernels.limits_kernel, types, {**whole, **sizes}, {"num_warps": 16, **exact})
    yield Case(sampling_kernels.scores_kernel, types, {**whole, **sizes}, {"num_warps": 8, **exact})
    yield Case(sampling_kernels.pick_kernel, types, sizes, {"num_warps": 1})


def main() -> None:
    for case in cases():
        kernel = case.compiled()
        conversions = kernel.asm["ttgir"].count("ttg.convert_layout")
        spilled = kernel.asm["ptx"].count(".local")
        line = {"kernel": case.kernel.__name__, **case.constants, "shared": kernel.metadata.shared, "conversions": conversions}
        print(json.dumps({**line, "local": spilled}), flush=True)


if __name__ == "__main__":
    main()
