"""What a format of quantized weights has to say: the tensors that make one weight, their dtypes, and the weight itself.

A weight's tensors have one stem, the module's name, and an ending each: `model.layers.0.mlp.up_proj` and `.qweight`, `.scales`.
The ending of the one that holds the codes is `main`. Modules without it are stored plainly.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from pdmesh.engine.loader.quantized.grid import Codes
from pdmesh.engine.models.reader import ConfigReader, UnsupportedModel

FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
"""Names of dtypes in headers of safetensors: those of plain weights."""
INTEGERS = frozenset({"I32"})
FP8 = frozenset({"F8_E4M3"})


@dataclass(frozen=True)
class Header:
    """What a file's header says of one tensor."""

    dtype: str
    shape: tuple[int, ...]


class Stored(Protocol):
    """The tensors of a checkpoint by their stored names."""

    def names(self) -> frozenset[str]: ...

    def header(self, name: str) -> Header | None: ...

    def tensor(self, name: str) -> Tensor:
        """Return the tensor, which counts as used. Raises ValueError naming it where there is none."""


@dataclass(frozen=True)
class Part:
    """A tensor beside a weight's codes, or these: the dtypes it may have."""

    dtypes: frozenset[str]
    required: bool = True


class WeightFormat(ABC):
    """One format with the settings of one checkpoint. Opening a checkpoint calls `check`, which reads headers only."""

    title: str
    main: str
    parts: Mapping[str, Part]
    ignored: str = r"(?!)"
    """A pattern of stored names that belong to the format and that no weight needs: scales of activations."""
    group: int = 0
    """Inputs that share a scale, where all weights have the same; 0: they have not."""
    note: str = ""
    """What is computed otherwise than the checkpoint says."""

    @abstractmethod
    def read(self, stem: str, stored: Stored, expert: int) -> Codes | Tensor:
        """Return the module's weight [out, in]: its codes, or where no kernel has such, the dequantized weight. `expert`: the one
        that is needed, where the weights of all experts are one tensor (-1: there are none)."""

    @abstractmethod
    def check_shapes(self, stem: str, stored: Stored) -> None:
        """Raise ValueError naming the tensor and both shapes, by headers alone."""

    def shape(self, stem: str, stored: Stored) -> tuple[int, ...]:
        """Return the shape of the weight that `read` gives, by headers: the stored one, where each number is a code."""
        return shape_of(stem + self.main, stored)

    def num_weights(self, name: str, header: Header) -> int:
        """Return how many weights the stored tensor holds: none, for one of a weight's other parts."""
        ending = self.ending(name)
        return _count(header.shape) if ending is None or ending == self.main else 0

    def ending(self, name: str) -> str | None:
        """Return which of the parts a stored tensor is."""
        return next((ending for ending in self.parts if name.endswith(ending)), None)

    def holds(self, stem: str, stored: Stored) -> bool:
        """Return whether the module's weight is quantized: under a plain weight's name its dtype says so."""
        header = stored.header(stem + self.main)
        return header is not None and (self.main != ".weight" or header.dtype in self.parts[self.main].dtypes)

    def stems(self, stored: Stored) -> list[str]:
        """Return the modules with quantized weights."""
        found = {name.removesuffix(ending) for name in stored.names() if (ending := self.ending(name)) is not None}
        return sorted(stem for stem in found if self.holds(stem, stored))

    def check(self, stored: Stored) -> None:
        """Raise ValueError, naming the tensor, unless every quantized weight has its parts, in the dtypes and shapes that the
        format says."""
        for stem in self.stems(stored):
            for ending, part in self.parts_of(stem).items():
                _check_part(self.title, stem + ending, part, stored)
            self.check_shapes(stem, stored)

    def parts_of(self, stem: str) -> Mapping[str, Part]:
        """Return the parts of one module's weight."""
        return self.parts


def _check_part(title: str, name: str, part: Part, stored: Stored) -> None:
    header = stored.header(name)
    if header is None and part.required:
        raise ValueError(f"no tensor {name!r}, which {title} needs; the checkpoint is incomplete")
    if header is not None and header.dtype not in part.dtypes:
        raise UnsupportedModel(f"{name}: stored as {header.dtype}; {title} has {' or '.join(sorted(part.dtypes))} there")


def require_shape(name: str, stored: Stored, *allowed: Sequence[int]) -> None:
    """Raise ValueError, with both shapes, unless the tensor is missing or has one of those allowed."""
    header = stored.header(name)
    if header is not None and header.shape not in [tuple(shape) for shape in allowed]:
        expected = " or ".join(str(tuple(shape)) for shape in allowed)
        raise ValueError(f"{name}: shape {header.shape} in the checkpoint, {expected} by its quantization_config and codes")


def shape_of(name: str, stored: Stored, dims: int = 2) -> tuple[int, ...]:
    """Return the tensor's shape. Raises ValueError unless it has so many dimensions."""
    header = stored.header(name)
    if header is None or len(header.shape) != dims:
        raise ValueError(f"{name}: shape {None if header is None else header.shape}; a weight's codes have {dims} dimensions")
    return header.shape


def _count(shape: Sequence[int]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total


def group_size(config: ConfigReader, *keys: str) -> int:
    """Return the inputs that share a scale, 0 for one scale an output. Raises UnsupportedModel."""
    group = config.number(*keys, default=128)
    config.ignore(*keys)
    if group != -1 and (group < 1 or group != int(group)):
        raise UnsupportedModel(f"{config.name(keys[0])} {group} is not supported; a group is a number of inputs, or -1 for all")
    return max(int(group), 0)


def finish(config: ConfigReader, *ignored: str) -> None:
    """Raise UnsupportedModel for keys that were neither read nor are among those that change no weight."""
    config.ignore("quant_method", *ignored)
    unread = config.unread()
    if unread:
        raise UnsupportedModel(
            f"{', '.join(unread)}: not read for quant_method {config.get('quant_method')!r}, so weights might be read wrongly; "
            "remove the key from config.json if it changes nothing"
        )
