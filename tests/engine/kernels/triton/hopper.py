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

from engine.kernels.triton import (
    attention_kernels,
    blocks,
    decode_kernels,
    gated,
    kv_kernels,
    norms,
    sampling_filters,
    sampling_kernels,
    weight_kernels,
)
from engine.kernels.triton.tiles import choose_tiles

HOPPER = GPUTarget("cuda", 90, 32)
_FLOATS = {"eps", "scale"}  # arguments; others that are neither constants nor pointers are integers


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
    yield from _keys_and_values()
    yield from _attention()
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


def _keys_and_values() -> Iterator[Case]:
    halves = dict.fromkeys(("qkv", "norm", "cos", "sin", "query", "keys", "values", "key", "value", "scales"), "bf16")
    types = {**halves, "positions": "i32", "slots": "i32"}
    heads = {"KV_HEADS": 8, "DIM": 128, "DIM_PAD": 128, "ROWS": 8, "HAS_SCALES": False}
    for has_norm in (False, True):
        sizes = {**heads, "HEADS": 32, "ROTARY": 128, "HAS_NORM": has_norm}
        yield Case(kv_kernels.rope_store_kernel, types, sizes, {"num_warps": 4})
    yield Case(kv_kernels.store_kernel, types, heads, {"num_warps": 4})
    shares = {"TOKEN_WORDS": 256, "SHARE_WORDS": 128, "BLOCK_SIZE": 16, "WORDS": 1024}
    for gathers in (False, True):
        pointers = {"pool": "i64", "piece": "i64", "block_ids": "i32"}
        yield Case(blocks.move_kernel, pointers, {**shares, "GATHERS": gathers}, {"num_warps": 4})
    names = ("message", "token_ids", "positions", "slots", "context_lens", "logits_rows", "block_tables", "drawn")
    yield Case(decode_kernels.unpack_kernel, dict.fromkeys(names, "i32"), {"BLOCK": 128}, {"num_warps": 4})


def _attention() -> Iterator[Case]:
    ints = ("query_starts", "split_starts", "context_lens", "block_tables", "tail_firsts", "tail_slots")
    types = {
        **dict.fromkeys(("query", "keys", "values", "scales", "out"), "bf16"),
        **dict.fromkeys(("part_acc", "part_stats"), "fp32"),
        **dict.fromkeys(ints, "i32"),
    }
    for dim in (64, 128):
        tiles = choose_tiles(dim, 2)
        merged = {"MAX_QUERIES": 16, "MIN_KEYS": 256, "MOST": 64, "DIM": dim, "DIM_PAD": dim, "HAS_WINDOW": False}
        merged["HAS_SCALES"] = False
        whole = {**merged, "GROUP": 4, "BLOCK_SIZE": 16, "BLOCK_N": tiles.keys, "HAS_TAILS": False}
        for kernel, rows, warps, stages in (
            (attention_kernels.split_kernel, tiles.split_rows, tiles.split_warps, tiles.split_stages),
            (attention_kernels.walk_kernel, tiles.walk_rows, tiles.walk_warps, tiles.walk_stages),
        ):
            switches = {name: value for name, value in whole.items() if name in kernel.arg_names}
            yield Case(kernel, types, {**switches, "BLOCK_M": rows}, {"num_warps": warps, "num_stages": stages})
        yield Case(attention_kernels.merge_kernel, types, {**merged, "UNROLL": 8}, {"num_warps": 1})


def _draws() -> Iterator[Case]:
    floats = ("logits", "adjusted", "best_values", "score_values", "packed", "sums")
    ints = ("best_ids", "score_ids", "packed_ids", "counts", "message", "arrivals", "tokens")
    types = {**dict.fromkeys(floats, "fp32"), **dict.fromkeys(ints, "i32"), "int_limits": "i64"}
    whole = {"VOCAB": 128_256, "CHUNK": 4096}
    sizes = {"NUM_CHUNKS": 32, "CHUNKS": 32}
    exact = {"enable_fp_fusion": False}
    yield Case(sampling_kernels.greedy_kernel, types, {**whole, **sizes}, {"num_warps": 8})
    yield Case(sampling_kernels.count_kernel, types, {"BLOCK": 256}, {"num_warps": 4})
    yield Case(sampling_kernels.adjust_kernel, types, whole, {"num_warps": 8, **exact})
    yield Case(sampling_filters.limits_kernel, types, {**whole, **sizes}, {"num_warps": 16, **exact})
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
