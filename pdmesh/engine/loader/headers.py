"""What the headers of a checkpoint show, before any weight is read: its config, which tensors it has, their shapes and dtypes.

The decoder is built once on torch's `meta` device, which has shapes and no numbers: whatever a loader will ask for is asked for
here, so a missing tensor or a wrong shape is refused in milliseconds. Run as a program, it checks a model for a launcher, which
keeps torch out of its own process:

    python -m pdmesh.engine.loader.headers MODEL [KEY=VALUE ...]        exits with 1 and one line if the model is refused

Of quantized safetensors their format says which shape a weight has that is stored in another one.
"""

from __future__ import annotations

import json
import math
import re
import struct
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from pdmesh.engine.loader import kv_scales
from pdmesh.engine.loader.builder import ask_for_all, open_checkpoint
from pdmesh.engine.loader.quantize import Int4Weight, Int8Weight
from pdmesh.engine.loader.quantized.weights import QuantizedWeights
from pdmesh.engine.loader.safetensors import (
    MissingTensor,
    SafetensorsSource,
    WeightSource,
    stored_names,
    warn_of_names,
    weight_files,
    without_numbers,
)
from pdmesh.engine.models.config import ModelConfig

_PLAIN = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "F64": torch.float64}


class HeaderSource:
    """Give the tensors of a folder's safetensors on device meta, see WeightSource."""

    def __init__(self, folder: Path, config: ModelConfig, quantized: QuantizedWeights | None = None) -> None:
        """Read the headers of all shards. Raises ValueError."""
        self.config, self._folder, self._quantized = config, folder, quantized
        self._family_names = stored_names(folder, config)
        self._stored: dict[str, tuple[str, list[int]]] = {}
        for path in weight_files(folder):
            self._stored.update(_header(path))
        self._taken: set[str] = set()

    def names(self) -> frozenset[str]:
        return frozenset(self._stored)

    def get(self, name: str) -> Tensor:
        """Return the tensor without numbers. Raises MissingTensor; ValueError for a dtype that no plain weights have."""
        take = self._family_names.find(name, self.config)
        if self._quantized is not None and self._quantized.holds(take.name):
            return self._quantized.unread(take)
        return take.read(self._shaped)

    def _shaped(self, stored: str) -> Tensor:
        if stored not in self._stored:
            raise MissingTensor(f"{self._folder}: no tensor {stored!r} in its safetensors; the checkpoint is incomplete")
        self._taken.add(stored)
        dtype, shape = self._stored[stored]
        if dtype not in _PLAIN:
            raise ValueError(
                f"{self._folder}: {stored} is stored as {dtype}; plain weights are {', '.join(_PLAIN)}, and config.json has no "
                "quantization_config that says how to read others; get the checkpoint again, or a plain one"
            )
        return without_numbers(shape, _PLAIN[dtype])

    def get_int4(self, name: str, group: int) -> Int4Weight | None:
        return None

    def get_int8(self, name: str) -> Int8Weight | None:
        return None

    def num_elements(self) -> int:
        return sum(math.prod(shape) for _, shape in self._stored.values())

    def unused(self) -> list[str]:
        """Return the stored tensors that nothing asked for and that the family does not ignore."""
        ignored = re.compile(f"{self._family_names.ignored}|{kv_scales.STORED}")
        return sorted(name for name in self._stored.keys() - self._taken if not ignored.fullmatch(name))


def _header(path: Path) -> dict[str, tuple[str, list[int]]]:
    """Return dtype and shape by name. The file was opened before, so its header is sound."""
    with path.open("rb") as file:
        (size,) = struct.unpack("<Q", file.read(8))
        table = json.loads(file.read(size))
    return {name: (entry["dtype"], entry["shape"]) for name, entry in table.items() if name != "__metadata__"}


def check_headers(source: WeightSource) -> list[str]:
    """Return the tensors of plain safetensors that no computation asks for. Raises ValueError for a tensor that is missing, or
    has another shape than its config says, and for one of a GGUF file that nothing uses: the architecture is then another."""
    if not isinstance(source, SafetensorsSource):
        from pdmesh.engine.loader.gguf.check import check_gguf  # the gguf package is imported only for GGUF files
        from pdmesh.engine.loader.gguf.source import GgufSource

        if isinstance(source, GgufSource):
            check_gguf(source)
        return []
    headers = HeaderSource(source.folder, source.config, source.quantized)
    ask_for_all(headers)
    return [] if source.quantized else headers.unused()


def warn_of_unused(source: WeightSource) -> None:
    """Check the headers, and name extra tensors in one line of the log. Raises as `check_headers`."""
    unused = check_headers(source)
    if isinstance(source, SafetensorsSource):
        warn_of_names(source.folder, unused)


def check_model(path: Path, overrides: Sequence[str] = ()) -> None:
    """Raise ValueError for a model that the engine would refuse by its headers."""
    source, _ = open_checkpoint(path, overrides)
    check_headers(source)


def main(argv: Sequence[str]) -> int:
    """Check the model that the arguments name; return the exit code."""
    try:
        check_model(Path(argv[0]), argv[1:])
    except (ValueError, OSError) as error:
        print(" ".join(str(error).split()), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
