"""One rank's part of maps in 8 or 4 bits.

Whole tensors are quantized, then cut: the scale of a row, or of a group, is that of the whole tensor, and a checkpoint's own
4 bits stay what they are. So a weight has the same bits whatever the degree, and degrees differ by the order of sums alone.
"""

from __future__ import annotations

from engine.numerics import Numerics
from engine.parallel.split import Shard, cut_quantized, whole_shape
from engine.weights.source import WeightSource
from engine.weights.triton import QuantizedMaps, Weight


class SharedMaps(QuantizedMaps):
    """Makes maps of a rank's shapes from the whole checkpoint `source`. Each rank quantizes all of it, one tensor at a time."""

    def __init__(self, source: WeightSource, numerics: Numerics, device: str, shard: Shard) -> None:
        super().__init__(source, numerics, device)
        self._shard = shard

    def _weight(self, name: str, rows: int, width: int) -> Weight:
        return cut_quantized(name, super()._weight(name, *whole_shape(name, rows, width, self._shard)), self._shard)
