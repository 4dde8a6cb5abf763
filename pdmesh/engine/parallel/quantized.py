"""One rank's part of maps in 8 or 4 bits.

The scale of a row, or of a group, is that of the whole tensor, and a checkpoint's own 4 bits do not change. So a weight
has the same bits whatever the tensor-parallel size, and sizes differ by the order of sums alone. Rows are cut before they are
quantized, and columns at the ends of groups: each rank reads and quantizes its own. Columns of int8 and fp8 are cut afterwards,
as their scale is that of a whole row: o and down, a quarter to a third of a model, are quantized whole by every rank.
"""

from __future__ import annotations

from torch import Tensor

from pdmesh.engine.backend_selection import Numerics
from pdmesh.engine.loader.safetensors import WeightSource, checked
from pdmesh.engine.loader.triton import QuantizedMaps, Weight
from pdmesh.engine.parallel.split import Shard, cut, cut_quantized, whole_shape


class SharedMaps(QuantizedMaps):
    """Make maps of a rank's shapes from the whole checkpoint `source`."""

    def __init__(self, source: WeightSource, numerics: Numerics, device: str, shard: Shard) -> None:
        super().__init__(source, numerics, device)
        self._shard = shard

    def _weight(self, name: str, rows: int, width: int) -> Weight:
        whole = whole_shape(name, rows, width, self._shard)
        exact = self._exact(name, *whole)
        if exact is not None:
            return cut_quantized(name, exact, self._shard)
        tensor = checked(self._source, name, whole)
        if self._has_own_scales(width, tensor):
            return self._quantized(name, cut(name, tensor, self._shard))
        return cut_quantized(name, self._quantized(name, tensor), self._shard)

    def _has_own_scales(self, width: int, whole: Tensor) -> bool:
        """Return whether a part of this width has the same scales as within the whole."""
        by_group = self._numerics.weights == "int4" and width % self._numerics.group == 0
        return by_group or width == whole.shape[1]
