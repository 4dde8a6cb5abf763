"""Devices that a worker may have: data-sheet figures, and the share of them that engines reach. Pure.

Operations a second are those of dense products: data sheets often print twice as many, for matrices of which half is zeros. A
link is counted in one direction, half of what data sheets add up. Another device comes from a JSON file:

    {"operations_per_s": {"bfloat16": 9.9e14}, "bytes_per_s": 3.3e12, "memory_bytes": 8e10, "link_bytes_per_s": 4.5e11}
"""

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pdmesh.planning.latency_model import COMPUTE_EFFICIENCY, MEMORY_EFFICIENCY

NUMBERS = ("float32", "float16", "bfloat16", "fp8", "int8")
"""Number formats of products."""
LINK_EFFICIENCY = 0.7
"""Share of a link's bandwidth that an all-reduce of a few megabytes reaches."""

_COUNTS = ("bytes_per_s", "memory_bytes", "link_bytes_per_s")
_SHARES = ("compute_share", "memory_share", "link_share")


class DeviceError(ValueError):
    """Raised for an unknown or invalid device: the problem and what to do."""


@dataclass(frozen=True)
class Device:
    """Describe a device. `operations_per_s` by number format of the products (a multiplication and an addition are two),
    `bytes_per_s` of its memory. `link_bytes_per_s`: to others of its kind in the same machine, in one direction; 0: no link. The
    shares are what real steps reach of each; 0.5 and 0.8 are the router's prior for a worker that has not stepped yet. `is_gpu`:
    what the engine calls cuda."""

    name: str
    operations_per_s: Mapping[str, float] = field(hash=False)
    bytes_per_s: float
    memory_bytes: float
    link_bytes_per_s: float = 0.0
    compute_share: float = COMPUTE_EFFICIENCY
    memory_share: float = MEMORY_EFFICIENCY
    link_share: float = LINK_EFFICIENCY
    is_gpu: bool = True
    source: str = ""

    def __post_init__(self) -> None:
        if not self.operations_per_s or any(name not in NUMBERS for name in self.operations_per_s):
            raise DeviceError(f"operations_per_s: give a table with one or more of {', '.join(NUMBERS)}")
        for name, value in self.operations_per_s.items():
            _require(0 < value < math.inf, f"operations_per_s.{name}", value, "more than 0")
        for name in _COUNTS:
            least = "0 or more" if name == "link_bytes_per_s" else "more than 0"
            value = getattr(self, name)
            _require(0 <= value < math.inf and (value > 0 or least == "0 or more"), name, value, least)
        for name in _SHARES:
            _require(0 < getattr(self, name) <= 1, name, getattr(self, name), "in (0, 1]")

    def operations_in(self, numbers: str) -> float:
        """Return the operations a second in this number format. Raises DeviceError if it has no such products."""
        if numbers not in self.operations_per_s:
            known = ", ".join(self.operations_per_s)
            raise DeviceError(
                f"{self.name} has no figure for products in {numbers}; it has {known}; choose another --quantization"
            )
        return self.operations_per_s[numbers]


def find_device(name: str) -> Device:
    """Return the known device of that name, or the one that a JSON file of that path describes. Raises DeviceError."""
    if name in DEVICES:
        return DEVICES[name]
    path = Path(name)
    if path.suffix != ".json":
        raise DeviceError(f"{name!r} is not known; give one of {', '.join(DEVICES)}, or a .json file that describes one")
    try:
        return device_of(path.stem, json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise DeviceError(f"{name}: {error}") from error


def device_of(name: str, table: object) -> Device:
    """Return the device from the file's content. Raises ValueError naming the field."""
    if not isinstance(table, dict):
        raise ValueError("holds no table; pdmesh/planning/devices.py has an example")
    known = {each.name for each in dataclasses.fields(Device)} - {"name"}
    unknown = sorted(set(table) - known)
    if unknown:
        raise ValueError(f"{unknown[0]}: unknown field; known are {', '.join(sorted(known))}")
    missing = [name for name in ("operations_per_s", "bytes_per_s", "memory_bytes") if name not in table]
    if missing:
        raise ValueError(f"{missing[0]}: is missing")
    operations = table["operations_per_s"]
    if not isinstance(operations, dict):
        raise ValueError('operations_per_s: must be a table by numbers, such as {"bfloat16": 9.9e14}')
    numbers = {**{f"operations_per_s.{key}": value for key, value in operations.items()}, **_plain(table)}
    for name_, value in numbers.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"{name_}: {value!r} is not a number")
    if not isinstance(table.get("is_gpu", True), bool):
        raise ValueError(f"is_gpu: {table['is_gpu']!r} is not true or false")
    return Device(name, **{each: table[each] for each in known & set(table)})


def _plain(table: Mapping[str, object]) -> dict[str, object]:
    return {name: table[name] for name in (*_COUNTS, *_SHARES) if name in table}


def _require(condition: bool, name: str, value: float, what: str) -> None:
    if not condition:
        raise DeviceError(f"{name}: {value} is not {what}")


def _nvidia(
    name: str, teraflops: float, eighths: Mapping[str, float], tb_per_s: float, gb: float, link_gb: float, source: str
) -> Device:
    """Return an NVIDIA device. `teraflops`: dense, in bfloat16 and float16 alike; `eighths`: in formats of eight bits."""
    operations = {"bfloat16": teraflops, "float16": teraflops, **eighths}
    table = {numbers: value * 1e12 for numbers, value in operations.items()}
    return Device(name, table, tb_per_s * 1e12, gb * 1e9, link_gb * 1e9, source=source)


_HOPPER = {"fp8": 1978.9, "int8": 1978.9}
DEVICES = {
    device.name: device
    for device in (
        _nvidia("h100-sxm", 989.4, _HOPPER, 3.35, 80, 450, "NVIDIA H100 data sheet: 1,979 TFLOPS with sparsity, 3.35 TB/s"),
        _nvidia("h200-sxm", 989.4, _HOPPER, 4.8, 141, 450, "NVIDIA H200 data sheet: 1,979 TFLOPS with sparsity, 4.8 TB/s"),
        _nvidia("a100-80g", 312, {"int8": 624}, 2.039, 80, 300, "NVIDIA A100 80GB SXM data sheet: 312 TFLOPS, 2,039 GB/s"),
        _nvidia("l40s", 362.05, {"fp8": 733, "int8": 733}, 0.864, 48, 32, "NVIDIA L40S data sheet: 362.05 TFLOPS, 864 GB/s"),
        _nvidia("l4", 121, {"fp8": 242.5, "int8": 242.5}, 0.3, 24, 32, "NVIDIA L4 data sheet: 242 TFLOPS sparse, 300 GB/s"),
        _nvidia("a10", 125, {"int8": 250}, 0.6, 24, 32, "NVIDIA A10 data sheet: 125 TFLOPS, 600 GB/s"),
        Device(
            "epyc-2-cores",
            {"int8": 944.5e9, "bfloat16": 472.2e9},
            57.9e9,
            23.5 * 2**30,
            is_gpu=False,
            source="two cores of an AMD EPYC, measured: benchmarks/results/cpu.json",
        ),
    )
}  # fmt: skip
