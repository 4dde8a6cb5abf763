"""A folder of PEFT's becomes an `Adapter`: every tensor is used or refused by name, every shape compared with the model's."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from pdmesh.adapter_id import ADAPTER_FILES, AdapterId, named_folder
from pdmesh.engine.config import EngineConfig
from pdmesh.engine.loader.hash import weights_hash
from pdmesh.engine.lora.adapter import Adapter, AdapterMap, Site, sites_of
from pdmesh.engine.lora.config import CONFIG_FILE, LoraConfig, read_lora_config
from pdmesh.engine.models.config import ModelConfig
from pdmesh.engine.models.names import Names
from pdmesh.engine.models.registry import family_of

WEIGHTS_FILE = ADAPTER_FILES[1]
DEFAULT_LORA_RANK = 64
"""Room for each adapter, where nothing asks for more: few adapters have higher ranks."""

_PREFIX = "base_model.model."
_TENSOR = re.compile(r"(?P<module>.+)\.lora_(?P<side>[AB])(?:\.default)?\.weight")
_FAULTS = {
    "lora_magnitude_vector": "DoRA's magnitudes are not computed; merge the adapter into the model",
    "lora_embedding_": "adapted embeddings are not computed; train without them, or merge the adapter into the model",
    "modules_to_save": "whole modules are not exchanged; merge the adapter into the model",
    "embed_tokens": "trained embeddings are not exchanged; merge the adapter into the model",
    "lm_head": "the output head is not adapted; train without it, or merge the adapter into the model",
    ".bias": "biases are not exchanged; merge the adapter into the model",
}


@dataclass(frozen=True)
class _Part:
    """One map of the engine at a stored module: which it is, and how its rows come out of the module's."""

    site: Site
    shape: tuple[int, int]
    rows: tuple[Callable[[Tensor], Tensor], ...]


def digest_of(folder: Path) -> str:
    """Return the SHA-256 (hex) of an adapter's files. Raises ValueError where one is missing."""
    files = [folder / CONFIG_FILE, folder / WEIGHTS_FILE]
    for path in files:
        if not path.is_file():
            raise ValueError(f"{folder}: no {path.name}; give the folder that PEFT's save_pretrained wrote{_other_files(folder)}")
    return weights_hash(files)


def _other_files(folder: Path) -> str:
    is_pickle = (folder / "adapter_model.bin").is_file()
    return " with safe_serialization=True (adapter_model.bin is not read: it may run code)" if is_pickle else ""


def load_adapter(name: str, folder: Path, model: ModelConfig) -> Adapter:
    """Read the adapter for this model. Raises ValueError that names folder and key or tensor."""
    digest = digest_of(folder)
    config = read_lora_config(folder)
    try:
        return Adapter(AdapterId(name, digest), _maps(config, _tensors(folder / WEIGHTS_FILE), model))
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from error


def configured_adapters(config: EngineConfig, model: ModelConfig) -> tuple[Adapter, ...]:
    """Read the adapters that `config.lora` names. Raises ValueError that names adapter, folder and key or tensor."""
    adapters = []
    for text in config.lora:
        name, folder = named_folder(text)
        try:
            adapters.append(load_adapter(name, Path(folder), model))
        except ValueError as error:
            raise ValueError(f"lora: {name}: {error}") from error
    return tuple(adapters)


def with_lora_rank(config: EngineConfig, adapters: Sequence[Adapter]) -> EngineConfig:
    """Return the config with the largest rank that there is room for: as configured, else that of the adapters that it names,
    and 64 at least. Raises ValueError for an adapter of more."""
    if not config.max_lora_rank:
        return replace(config, max_lora_rank=max([DEFAULT_LORA_RANK, *(adapter.rank for adapter in adapters)]))
    for adapter in adapters:
        if adapter.rank > config.max_lora_rank:
            raise ValueError(
                f"lora: {adapter.id.name}: rank {adapter.rank}, and max_lora_rank is {config.max_lora_rank}; raise it"
            )
    return config


def _tensors(path: Path) -> dict[str, Tensor]:
    try:
        with safe_open(path, framework="pt") as file:
            return {name.removeprefix(_PREFIX): file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"{path.name} cannot be read ({error}); it is cut off or no safetensors file, get it again") from error


def _maps(config: LoraConfig, tensors: Mapping[str, Tensor], model: ModelConfig) -> dict[Site, AdapterMap]:
    modules = modules_of(model)
    pairs = _pairs(tensors, modules)
    for module in modules:
        if config.is_target(module) and module not in pairs:
            raise ValueError(f"{module}: named by target_modules, and {WEIGHTS_FILE} has no weights of it; it is incomplete")
    maps: dict[Site, AdapterMap] = {}
    for module, sides in pairs.items():
        if not config.is_target(module):
            raise ValueError(f"{module}.lora_A.weight: {CONFIG_FILE} does not target this map; both files must be of one adapter")
        maps |= _maps_of(module, sides, config, modules[module])
    if not maps:
        raise ValueError(f"{WEIGHTS_FILE} has no weights of any map of this model; it is for another model")
    return maps


def modules_of(model: ModelConfig) -> dict[str, list[_Part]]:
    """Return the maps that may have an adapter by the path of the stored module, several where one module holds them fused."""
    modules: dict[str, list[_Part]] = {}
    names = family_of(model.model_type).names_for(model)
    for site, shape in sites_of(model).items():
        found = _stored(names, site, model)
        if found is not None:
            modules.setdefault(found[0], []).append(_Part(site, shape, found[1]))
    return modules


def _stored(names: Names, site: Site, model: ModelConfig) -> tuple[str, tuple[Callable[[Tensor], Tensor], ...]] | None:
    take = names.find_rows(f"model.layers.{site.layer}.{site.stem}.weight", model)
    return (take.name.removesuffix(".weight"), take.change) if take.name.endswith(".weight") else None


def _pairs(tensors: Mapping[str, Tensor], modules: Mapping[str, list[_Part]]) -> dict[str, dict[str, Tensor]]:
    """Return A and B by module. Raises ValueError for a tensor that is no part of a pair, or of a map that has no adapters."""
    pairs: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        fault = next((why for part, why in _FAULTS.items() if part in name), None)
        if fault is not None:
            raise ValueError(f"{name}: {fault}")
        match = _TENSOR.fullmatch(name)
        if match is None:
            raise ValueError(f"{name}: neither lora_A nor lora_B of a map; this engine does not know what it means")
        if match["module"] not in modules:
            raise ValueError(f"{name}: no map of this model that adapters may change; the adapter is for another model")
        pairs.setdefault(match["module"], {})[match["side"]] = _finite(name, tensor)
    for module, sides in pairs.items():
        for side in "AB":
            if side not in sides:
                raise ValueError(f"{module}.lora_{side}.weight: missing; the file is incomplete")
    return pairs


def _finite(name: str, tensor: Tensor) -> Tensor:
    if not tensor.is_floating_point():
        raise ValueError(f"{name}: dtype {str(tensor.dtype).removeprefix('torch.')} is no floating dtype; save it unquantized")
    wide = tensor.float()
    if not bool(torch.isfinite(wide).all()):
        raise ValueError(f"{name}: some of its numbers are not finite; training has failed, take an earlier checkpoint")
    return wide


def _maps_of(module: str, sides: Mapping[str, Tensor], config: LoraConfig, parts: list[_Part]) -> dict[Site, AdapterMap]:
    rank, inputs = config.rank_of(module), parts[0].shape[1]
    _check_shape(f"{module}.lora_A.weight", sides["A"], (rank, inputs))
    outputs = sum(part.shape[0] for part in parts)
    _check_shape(f"{module}.lora_B.weight", sides["B"], (outputs, rank))
    scaled = sides["B"] * config.scale_of(module)
    maps = {}
    for part in parts:
        rows = scaled
        for change in part.rows:
            rows = change(rows)
        maps[part.site] = AdapterMap(sides["A"].contiguous(), rows.contiguous())
    return maps


def _check_shape(name: str, tensor: Tensor, expected: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != expected:
        raise ValueError(f"{name}: shape {tuple(tensor.shape)}, by {CONFIG_FILE} and the model {expected}: not of this model")
