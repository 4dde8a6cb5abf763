"""Loading of a model folder or a .gguf file as a model that can run."""

from __future__ import annotations

import ctypes
import hashlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pdmesh.engine.backend_selection import Numerics, choose_numerics, wants_triton
from pdmesh.engine.config import EngineConfig
from pdmesh.engine.kernels.cpu import isa
from pdmesh.engine.kernels.cpu.build import BuildFailed, NoCompiler
from pdmesh.engine.kernels.cpu.core_table import CoreTable
from pdmesh.engine.kernels.cpu.library import default_threads, open_library
from pdmesh.engine.kernels.cpu.model import KERNEL_REVISION, NativeModel, PackedWeights
from pdmesh.engine.kernels.cpu.step_memory import StepBuffers
from pdmesh.engine.kernels.triton.support import why_not_here
from pdmesh.engine.loader.builder import Progress, TorchBuilder, numeric_mode, open_checkpoint
from pdmesh.engine.loader.hash import weights_hash
from pdmesh.engine.loader.headers import warn_of_unused
from pdmesh.engine.loader.kv_scales import KVScales, known_scales, pool_scales
from pdmesh.engine.loader.pack import NativeBuilder, one_torch_thread
from pdmesh.engine.loader.packed_cache import Name, PackedCache
from pdmesh.engine.loader.safetensors import MissingTensor, SafetensorsSource, WeightSource
from pdmesh.engine.lora.adapter import Adapter, places_bytes
from pdmesh.engine.lora.folder import configured_adapters, with_lora_rank
from pdmesh.engine.lora.native_maps import NativeAdapters
from pdmesh.engine.lora.registry import AdapterSlots
from pdmesh.engine.lora.torch_maps import TorchAdapters
from pdmesh.engine.memory import check_adapters_fit, check_weights_fit, effective_max_context, free_memory, torch_step_bytes
from pdmesh.engine.models.config import ModelConfig
from pdmesh.engine.models.decoder import DecoderModel
from pdmesh.engine.outputs import CoreSeconds
from pdmesh.engine.parallel.split import check_degree, num_elements_held
from pdmesh.engine.runner.model_runner import TokenSampler
from pdmesh.engine.sampling.sampler import Sampler

if TYPE_CHECKING:
    from pdmesh.engine.kernels.triton.model import TritonModel
    from pdmesh.engine.parallel.model import ParallelModel

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoadedModel:
    """Hold a model with what the mesh needs to know about it.

    `numeric_mode` names everything that decides the bits of a logit: workers with equal hash and mode give equal tokens.
    """

    config: ModelConfig
    model: NativeModel | DecoderModel | TritonModel | ParallelModel
    weights_hash: str
    dtype: torch.dtype  # of activations and of what is not quantized
    kv_dtype: torch.dtype
    numeric_mode: str
    adapters: tuple[Adapter, ...] = ()  # to be loaded before the first request
    adapter_slots: AdapterSlots | None = None  # the model's places for adapters; None: it has none
    kv_scales: KVScales = ()  # the checkpoint's, for KV in fp8 here or at a sender; empty: all are 1, or invalid

    def sampler(self) -> TokenSampler:
        """Return the model's own sampler, which samples where the model computes; torch's where it has none."""
        own = getattr(self.model, "sampler", None)
        return own() if own is not None else Sampler()

    @property
    def mapped_bytes(self) -> int:
        """Return the bytes of weights that are pages of a file: the system counts them as free, but every step reads them."""
        return self.model.weights.mapped_bytes if isinstance(self.model, NativeModel) else 0

    @property
    def runs_ahead(self) -> bool:
        """Return whether the model supports overlap scheduling (pdmesh/engine/runner/overlap.py)."""
        return hasattr(self.model, "keep_drawn")

    def expert_counts(self) -> Tensor | None:
        """Return the tokens that each expert got since start, [layers with experts, num_experts] int64; None: the model has no
        experts, or its kernels do not count."""
        own = getattr(self.model, "expert_counts", None)
        return own() if own is not None else None

    def core_seconds(self) -> CoreSeconds | None:
        """Return for how long it has lent its cores and borrowed others'; None: it shares none."""
        return self.model.core_seconds() if isinstance(self.model, NativeModel) else None

    def step_bytes(self, config: EngineConfig) -> int:
        """Return the memory that steps and their graphs need besides weights and pool; 0: the model does not say."""
        num_tokens, num_rows = config.max_num_batched_tokens, min(config.max_num_batched_tokens, config.max_num_seqs)
        if isinstance(self.model, NativeModel):
            sizes = num_tokens, num_rows, self.model.num_threads, self.model.max_threads
            return StepBuffers(self.config, self.model.weights, *sizes, has_adapters=self.adapter_slots is not None).num_bytes()
        if isinstance(self.model, DecoderModel):
            return torch_step_bytes(self.model.config, self.dtype.itemsize, num_tokens, num_rows)
        own = getattr(self.model, "step_bytes", None)
        return own(config) if own is not None else 0

    def rest(self) -> None:
        """Say that nothing is to be computed until the next step."""
        if isinstance(self.model, NativeModel):
            self.model.rest()

    def prepare(self, kv: Tensor) -> None:
        """Prepare before the first request what its first steps would wait for, such as the recording of graphs on the pool
        `kv`."""
        own = getattr(self.model, "prepare", None)
        if own is not None and is_prepared_on(kv.device):
            own(kv)


def is_prepared_on(device: torch.device) -> bool:
    """Return whether models are prepared; not on the CPU, where nothing is compiled or recorded."""
    return device.type != "cpu"


def load_model(
    config: EngineConfig, progress: Progress = lambda _share, _text: None, *, beside: NativeModel | None = None
) -> LoadedModel:
    """Load `config.model` for `config.device` in the configured formats. `progress` gets (share done, description). `beside`: a
    model with whose threads it is to compute, in turn with it.

    Raises ValueError (its message names file, field or numbers): the model does not exist, is not supported, is incomplete, does
    not fit (DoesNotFit), or its device does not exist.
    """
    config.validate()
    config.check_own_ranks()
    if config.num_threads:
        torch.set_num_threads(config.num_threads)
    _check_device(config.device)
    source, files = open_checkpoint(Path(config.model), config.override)
    warn_of_unused(source)
    check_degree(config.tensor_parallel, source.config, device=config.device, expert_parallel=config.expert_parallel)
    library, why_none = _open_kernels(config, lambda text: progress(0.0, text))
    numerics = choose_numerics(
        config,
        source.config,
        has_int4=_has_int4(source, config),
        no_library=why_none,
        no_triton=why_not_here(config.device) if wants_triton(config) else "",
    )
    if numerics.why_torch:
        logger.warning("the slower torch backend computes this model: %s", numerics.why_torch)
    adapters = configured_adapters(config, source.config)
    config = with_lora_rank(config, adapters)
    weight_bytes, free_bytes = numerics.num_bytes(source.config, _num_elements(source, config)), free_memory(config.device)
    check_weights_fit(weight_bytes, free_bytes, config.device)
    if numerics.backend == "triton":  # others take memory as adapters come
        places = places_bytes(source.config, config.num_adapter_slots, config.max_lora_rank, numerics.dtype.itemsize)
        check_adapters_fit(places, weight_bytes, free_bytes, config)
    digest = _overridden(weights_hash(files, lambda share: progress(0.3 * share, "hashing weights")), config.override)
    loading = partial(_load, source, config, numerics, digest, library, beside)
    model, mode = loading(lambda share, text: progress(0.3 + 0.7 * share, text))
    kv_scales = known_scales(source, numerics.kv_dtype)
    progress(1.0, "loaded")
    if source.config.rope.is_long(effective_max_context(config, source.config)):
        mode += "-long"  # rotated keys of the other kind are of no use here
    return LoadedModel(
        source.config,
        model,
        digest,
        numerics.dtype,
        numerics.kv_dtype,
        mode,
        adapters=adapters,
        adapter_slots=_adapter_slots(model, config),
        kv_scales=kv_scales,
    )


def _adapter_slots(model: object, config: EngineConfig) -> AdapterSlots | None:
    if not config.num_adapter_slots:
        return None
    if isinstance(model, NativeModel):
        return NativeAdapters(model)
    return TorchAdapters(model) if isinstance(model, DecoderModel) else getattr(model, "adapter_slots", None)


def _load(
    source: WeightSource,
    config: EngineConfig,
    numerics: Numerics,
    digest: str,
    library: ctypes.CDLL | None,
    beside: NativeModel | None,
    progress: Progress,
) -> tuple[NativeModel | DecoderModel | TritonModel | ParallelModel, str]:
    """Return the model, and its numeric mode; log what was read of the checkpoint."""
    max_context = effective_max_context(config, source.config)
    if config.tensor_parallel > 1:
        from pdmesh.engine.parallel.load import load_with_ranks  # it imports this module

        return load_with_ranks(source, config, numerics, progress)
    if numerics.backend == "triton":
        loaded = _load_triton(source, config, numerics, progress)
        _log_reading(source, config, numerics)
        return loaded
    if numerics.backend == "torch" or library is None:
        model = TorchBuilder(source, numerics.dtype, config.device).build(max_context, progress)
        _log_reading(source, config, numerics)
        return model, numeric_mode(model, config.device)
    num_threads = config.num_threads or default_threads()
    weights = _packed_weights(NativeBuilder(source, numerics, max_context), config, digest, progress)
    has_cores = bool(config.core_table) and beside is None
    cores = CoreTable(config.core_table, num_threads, config.shared_cores) if has_cores else None
    native = NativeModel(
        library, source.config, weights, block_size=config.block_size, kv_dtype=numerics.kv_dtype, num_threads=num_threads,
        cores=cores, beside=beside,
    )  # fmt: skip
    return native, numerics.name(f"native{KERNEL_REVISION}-{isa.detect().mode}")


def _packed_weights(builder: NativeBuilder, config: EngineConfig, digest: str, progress: Progress) -> PackedWeights:
    """Return the weights, from the cache of packed ones unless it is off."""
    cache, numerics, model = PackedCache.configured(config.packed_cache, config.packed_pages), builder.numerics, builder.config

    def pack(progress: Progress) -> PackedWeights:
        weights = builder.pack(progress)
        _log_reading(builder.source, config, numerics)
        return weights

    with one_torch_thread():
        if cache is None:
            return builder.with_tables(pack(progress))
        num_bytes = numerics.num_bytes(model, builder.source.num_elements())
        return builder.with_tables(cache.load(Name.of(digest, numerics), model, num_bytes, pack, progress))


def _log_reading(source: WeightSource, config: EngineConfig, numerics: Numerics) -> None:
    """Log what a folder's quantized weights were. Weights that an earlier start packed were logged then."""
    if isinstance(source, SafetensorsSource):
        source.log_reading(numerics.weights, numerics.group, numerics.num_bytes(source.config, _num_elements(source, config)))


def _load_triton(source: WeightSource, config: EngineConfig, numerics: Numerics, progress: Progress) -> tuple[TritonModel, str]:
    # triton is not installed everywhere
    from pdmesh.engine.loader.triton import QuantizedMaps, TritonBuilder, triton_model

    max_context = effective_max_context(config, source.config)
    maps = QuantizedMaps(source, numerics, config.device) if numerics.is_quantized else None
    decoder = TritonBuilder(source, numerics.dtype, config.device, maps).build(max_context, progress)
    return triton_model(decoder, config, numerics, max_context, pool_scales(source, numerics.kv_dtype))


def _overridden(digest: str, overrides: Sequence[str]) -> str:
    """Return the hash of a model that is read with overrides: it computes otherwise, so it is another model to the mesh."""
    return hashlib.sha256("\0".join((digest, *sorted(overrides))).encode()).hexdigest() if overrides else digest


def _num_elements(source: WeightSource, config: EngineConfig) -> int:
    """Return the number of weights that the device's memory has to hold."""
    on_one_device = config.device == "cpu"
    return num_elements_held(source.config, source.num_elements(), config.tensor_parallel, one_memory=on_one_device)


def _has_int4(source: WeightSource, config: EngineConfig) -> bool:
    """Return whether the checkpoint's own weights have 4 bits, in the configured groups. The first product decides for all."""
    try:
        return source.get_int4("model.layers.0.self_attn.q_proj.weight", config.quantization_group) is not None
    except MissingTensor:
        return False  # another family's name


def _open_kernels(config: EngineConfig, say: Callable[[str], None]) -> tuple[ctypes.CDLL | None, str]:
    """Return the native library, or why there is none. It is opened only where it is used."""
    if config.backend in ("triton", "torch") or config.device != "cpu":
        return None, "it was not asked for"
    try:
        return open_library(say), ""
    except (NoCompiler, BuildFailed, OSError) as error:
        return None, str(error)


def _check_device(device: str) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device: cuda is not available to this torch; install a CUDA build, or give device=cpu")
