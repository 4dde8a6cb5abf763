"""The C boundary of the CPU kernels: the structs of abi.h, and the library's functions with their types."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, c_double, c_float, c_int32, c_int64, c_void_p
from functools import cache

from pdmesh.engine.kernels.cpu.build import Say, load_library

FORMATS = {"float32": 0, "bfloat16": 1, "int8": 2, "int4": 3}


class Linear(Structure):
    _fields_ = (
        *((name, c_int32) for name in ("format", "n", "k", "group")),
        ("packed", c_void_p),
        ("scales", c_void_p),
        ("bias", c_void_p),
    )


class Layer(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("input_norm", "mlp_norm", "query_norm", "key_norm")),
        *((name, Linear) for name in ("qkv", "output", "gate_up", "down")),
        ("window", c_int64),
    )


class Model(Structure):
    _fields_ = (
        *(
            (name, c_int32)
            for name in ("num_layers", "hidden", "intermediate", "num_heads", "num_kv_heads", "head_dim", "rotary_dim", "vocab")
        ),
        *((name, c_int32) for name in ("block_size", "kv_format", "embedding_format", "max_context")),
        ("eps", c_float),
        ("attention_scale", c_float),
        ("layers", POINTER(Layer)),
        ("norm", c_void_p),
        ("head", Linear),
        ("embedding", c_void_p),
        ("cos", c_void_p),
        ("sin", c_void_p),
    )


class Profile(Structure):
    """Nanoseconds of each stage of one step."""

    _fields_ = tuple(
        (name, c_int64) for name in ("embed", "prepare", "qkv", "rope", "attention", "output", "gate_up", "down", "head", "total")
    )

    def nanoseconds(self) -> dict[str, int]:
        """By stage; `total` is measured by itself."""
        return {field[0]: getattr(self, field[0]) for field in self._fields_}


class Step(Structure):
    _fields_ = (
        *((name, c_int32) for name in ("num_tokens", "num_seqs", "num_rows")),
        *(
            (name, c_void_p)
            for name in (
                "token_ids",
                "positions",
                "slots",
                "query_starts",
                "context_lens",
                "blocks",
                "block_starts",
                "logits_rows",
                "kv",
            )
        ),
        ("num_blocks", c_int64),
        ("logits", c_void_p),
        ("hidden", c_void_p),
        ("profile", POINTER(Profile)),
        ("layers_done", c_void_p),
        ("signal_fd", c_int32),
        ("signal_every", c_int32),
        ("tails", c_void_p),
        ("tail_slots", c_void_p),
        ("num_tails", c_int64),
    )


class Pool(Structure):
    _fields_ = (
        *((name, c_int32) for name in ("num_layers", "block_size", "num_kv_heads", "head_dim", "format")),
        ("num_blocks", c_int64),
        ("kv", c_void_p),
    )


_STRUCTS = (Linear, Layer, Model, Step, Profile, Pool)


def open_library(say: Say = print) -> ctypes.CDLL:
    """The library for this processor, compiled at first use, with the types of its functions set.

    Raises NoCompiler or BuildFailed (engine/kernels/cpu/build.py), and OSError for a library of another version.
    """
    library = load_library(say)
    _check_abi(library)
    signatures = {
        "pdmesh_engine_create": (c_void_p, (POINTER(Model), c_int32, c_int32)),
        "pdmesh_engine_create_beside": (c_void_p, (POINTER(Model), c_void_p)),
        "pdmesh_engine_destroy": (None, (c_void_p,)),
        "pdmesh_engine_team": (c_void_p, (c_void_p,)),
        "pdmesh_engine_step": (c_int32, (c_void_p, POINTER(Step))),
        "pdmesh_move_slots": (c_int32, (POINTER(Pool), c_void_p, c_void_p, c_int32)),
        "pdmesh_read_bandwidth": (c_double, (c_void_p, c_int64, c_int32, c_int32)),
        "pdmesh_product_peak": (c_double, (c_int32, c_int32, c_int32)),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


@cache
def shared_library() -> ctypes.CDLL:
    """The same, opened once in this process and compiled without a word."""
    return open_library(lambda _text: None)


def _check_abi(library: ctypes.CDLL) -> None:
    sizes = (c_int64 * len(_STRUCTS))()
    library.pdmesh_abi(sizes)
    if tuple(sizes) != tuple(ctypes.sizeof(struct) for struct in _STRUCTS):
        raise OSError(f"the CPU kernels' structs are {tuple(sizes)} bytes, not as library.py has them; abi.h and it disagree")
