"""The C boundary of the CPU kernels: the structs of abi.h, and the library's functions with their types."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, Structure, c_double, c_float, c_int32, c_int64, c_void_p
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from pdmesh.engine.kernels.cpu.build import Say, load_library
from pdmesh.engine.kv_cache.pool import private_memory
from pdmesh.platform.fallbacks import CGROUP, cores_to_share

FORMATS = {"float32": 0, "bfloat16": 1, "int8": 2, "int4": 3, "wide bfloat16": 4}
NORM_KINDS = {"rms": 0, "layer": 1}
HEAD_NORMS = {"": 0, "head": 0, "heads": 1, "all": 2}
ACTIVATIONS = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "relu": 3, "relu2": 4, "swiglu_oai": 5}
SCORINGS = {"softmax": 0, "sigmoid": 1, "softmax_topk": 2, "sparsemixer": 3, "sigmoid_topk": 4}
ADAPTED_PRODUCTS = ("qkv", "output", "gate_up", "down")  # of a layer, in the order of abi.h


class Linear(Structure):
    _fields_ = (
        *((name, c_int32) for name in ("format", "n", "k", "group")),
        ("packed", c_void_p),
        ("scales", c_void_p),
        ("bias", c_void_p),
    )


class Norm(Structure):
    _fields_ = (("weight", c_void_p), ("bias", c_void_p), ("eps", c_float), ("kind", c_int32))


class Rope(Structure):
    _fields_ = (("cos", c_void_p), ("sin", c_void_p), ("dim", c_int64))


class Expert(Structure):
    _fields_ = (("gate_up", Linear), ("down", Linear))


class Experts(Structure):
    _fields_ = (
        *((name, c_int32) for name in ("num_experts", "top_k", "scoring", "normalizes", "num_groups", "top_groups")),
        *((name, c_int32) for name in ("ranks_by_two", "activation")),
        *((name, c_float) for name in ("scale", "jitter", "limit")),
        ("has_shared_gate", c_int32),
        ("scales_input", c_int32),
        ("router", Linear),
        ("correction", c_void_p),
        ("experts", POINTER(Expert)),
        ("shared", POINTER(Expert)),
        ("counts", c_void_p),
    )


class Latent(Structure):
    _fields_ = (
        *((name, c_int32) for name in ("kv_rank", "nope_dim", "rope_dim", "value_dim")),
        ("query_norm", Norm),
        ("latent_norm", Norm),
        ("queries", Linear),
        ("key_maps", POINTER(Linear)),
        ("value_maps", POINTER(Linear)),
    )


class Layer(Structure):
    _fields_ = (
        *((name, Norm) for name in ("input_norm", "mlp_norm", "post_attention_norm", "post_mlp_norm", "query_norm", "key_norm")),
        *((name, Linear) for name in ("qkv", "output", "gate_up", "down")),
        ("sinks", c_void_p),
        ("temperatures", c_void_p),
        ("experts", POINTER(Experts)),
        ("latent", POINTER(Latent)),
        ("window", c_int64),
        ("rope", c_int64),
    )


class Model(Structure):
    _fields_ = (
        *(
            (name, c_int32)
            for name in ("num_layers", "hidden", "intermediate", "num_heads", "num_kv_heads", "head_dim", "vocab", "max_context")
        ),
        *((name, c_int32) for name in ("block_size", "kv_format", "embedding_format")),
        *((name, c_int32) for name in ("head_norms", "norms_rotated", "activation", "is_gated", "is_parallel")),
        *((name, c_float) for name in ("attention_scale", "attention_softcap")),
        *((name, c_float) for name in ("embedding_multiplier", "residual_multiplier", "logits_multiplier", "logits_softcap")),
        ("layers", POINTER(Layer)),
        ("embedding_norm", Norm),
        ("norm", Norm),
        ("head", Linear),
        ("embedding", c_void_p),
        ("positions", c_void_p),
        ("ropes", Rope * 2),
    )


class Profile(Structure):
    """Nanoseconds of each stage of one step."""

    _fields_ = tuple(
        (name, c_int64) for name in ("embed", "prepare", "qkv", "rope", "attention", "output", "gate_up", "down", "head", "total")
    )

    def nanoseconds(self) -> dict[str, int]:
        """Return the nanoseconds of each stage; `total` is measured by itself."""
        return {field[0]: getattr(self, field[0]) for field in self._fields_}


class AdapterPart(Structure):
    _fields_ = (("up", Linear), ("column", c_int32), ("first", c_int32), ("step", c_int32))


class AdapterMap(Structure):
    _fields_ = (("down", Linear), ("parts", POINTER(AdapterPart)), ("num_parts", c_int64))


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
        ("adapter_slots", c_void_p),
        ("adapters", POINTER(POINTER(AdapterMap))),
    )


class AdapterTable:
    """Hold what steps read of the adapters, by slot. Between steps it may change."""

    def __init__(self, num_slots: int) -> None:
        self.maps = (POINTER(AdapterMap) * num_slots)()
        self._owned: dict[int, object] = {}

    def put(self, slot: int, maps: Sequence[AdapterMap], owned: object) -> None:
        """Fill a slot with an adapter's maps, [num_layers * len(ADAPTED_PRODUCTS)]; `owned` is what they point to."""
        array = (AdapterMap * len(maps))(*maps)
        self.maps[slot] = ctypes.cast(array, POINTER(AdapterMap))
        self._owned[slot] = (array, owned)

    def drop(self, slot: int) -> None:
        """Empty a slot, if it is filled."""
        self.maps[slot] = POINTER(AdapterMap)()
        self._owned.pop(slot, None)

    def check(self, slots: Sequence[int]) -> None:
        """Raise ValueError for slots that are empty; -1 stands for no adapter."""
        if empty := set(slots) - self._owned.keys() - {-1}:
            raise ValueError(f"adapter_slots: {sorted(empty)} hold no adapter; load it before the batch names it")


class Pool(Structure):
    _fields_ = (
        *((name, c_int32) for name in ("num_layers", "block_size", "num_kv_heads", "head_dim", "format")),
        ("num_blocks", c_int64),
        ("kv", c_void_p),
    )


_STRUCTS = (Linear, Layer, Model, Step, Profile, Pool, Experts, Latent, AdapterPart, AdapterMap)


def open_library(say: Say = print) -> ctypes.CDLL:
    """Return the library for this processor, compiled at first use, with the types of its functions set.

    Raises NoCompiler or BuildFailed (pdmesh/engine/kernels/cpu/build.py), and OSError for a library of another version.
    """
    library = load_library(say)
    _check_abi(library)
    signatures = {
        "pdmesh_engine_create": (c_void_p, (POINTER(Model), c_int32, c_int32, c_void_p, c_int32, c_int32)),
        "pdmesh_engine_rest": (None, (c_void_p,)),
        "pdmesh_engine_create_beside": (c_void_p, (POINTER(Model), c_void_p)),
        "pdmesh_engine_destroy": (None, (c_void_p,)),
        "pdmesh_engine_team": (c_void_p, (c_void_p,)),
        "pdmesh_reserved_bytes": (c_int64, ()),
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
    """Return the library, opened once in this process and compiled without messages."""
    return open_library(lambda _text: None)


def _check_abi(library: ctypes.CDLL) -> None:
    sizes = (c_int64 * len(_STRUCTS))()
    library.pdmesh_abi(sizes)
    if tuple(sizes) != tuple(ctypes.sizeof(struct) for struct in _STRUCTS):
        raise OSError(f"the CPU kernels' structs are {tuple(sizes)} bytes, not as library.py has them; abi.h and it disagree")


# Memory for the weights of one layer, one after the other in large pages


_ALIGNMENT = 64
_HUGE_PAGE = 2 * 2**20


def allocate(num_bytes: int) -> Tensor:
    """Return `num_bytes` zero bytes (uint8) that begin at a large page."""
    whole = torch.frombuffer(private_memory(num_bytes + _HUGE_PAGE), dtype=torch.uint8)
    offset = -whole.data_ptr() % _HUGE_PAGE
    return whole[offset : offset + num_bytes]


def gather(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return copies of the tensors, one after the other in one allocation, each at a multiple of 64 bytes."""
    starts, end = [], 0
    for tensor in tensors:
        starts.append(end)
        end += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
    memory = allocate(end)
    copies = []
    for tensor, start in zip(tensors, starts, strict=True):
        copy = memory[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        copies.append(copy.copy_(tensor))
    return copies


# The machine's limits, measured with the instructions of the kernels, to compare speeds with


GIB = 2**30
_KINDS = {"int8": 0, "bfloat16": 1, "float32": 2, "int4": 3, "int8 KV": 4}


def read_bandwidth_gb_s(num_threads: int = 0, *, num_bytes: int = GIB, repeats: int = 8) -> float:
    """Return 10^9 bytes a second of all threads streaming over `num_bytes` (larger than the caches) once; the best of
    `repeats`."""
    buffer = allocate(num_bytes).fill_(1)
    rate: float = shared_library().pdmesh_read_bandwidth(buffer.data_ptr(), num_bytes, _threads(num_threads), repeats)
    return rate / 1e9


def product_peak_gop_s(kind: str, num_threads: int = 0, *, repeats: int = 20) -> float:
    """Return 10^9 operations a second (a multiplication and an addition are two) of products by the kernels' inner
    loops on what the first cache holds; `kind`: int4 (without scales), int8, bfloat16, float32, or "int8 KV" (attention's with
    int8 keys and values). Raises KeyError for another."""
    rate: float = shared_library().pdmesh_product_peak(_KINDS[kind], _threads(num_threads), repeats)
    return rate / 1e9


def int8_peak_gop_s(num_threads: int = 0) -> float:
    """Return the peak of int8 products, in 10^9 operations a second."""
    return product_peak_gop_s("int8", num_threads)


def int4_peak_gop_s(num_threads: int = 0) -> float:
    """Return the peak of int4 products, in 10^9 operations a second."""
    return product_peak_gop_s("int4", num_threads)


def bf16_peak_gflop_s(num_threads: int = 0) -> float:
    """Return the peak of bfloat16 products, in 10^9 operations a second."""
    return product_peak_gop_s("bfloat16", num_threads)


def kv_peak_gop_s(num_threads: int = 0) -> float:
    """Return the peak of attention's products with int8 keys and values, in 10^9 operations a second."""
    return product_peak_gop_s("int8 KV", num_threads)


def _threads(num_threads: int) -> int:
    return num_threads or torch.get_num_threads()


def default_threads(cgroup: Path = CGROUP) -> int:
    """Return physical cores (torch counts them), less those that affinity or a container's processor quota exclude: threads
    beyond a quota would wait at every barrier for one that the system holds back."""
    return max(1, min(torch.get_num_threads(), len(cores_to_share(cgroup))))
