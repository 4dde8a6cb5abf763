"""`python -m benchmarks.peers.openvino_export FOLDER TARGET BITS`, under its own environment: a checkpoint in OpenVINO's format.

Weights of 8 bits have a scale and a zero for each output; those of 4 are symmetric with a scale for 128 inputs, all layers.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

_QUANTIZATIONS: dict[int, dict[str, Any]] = {
    8: {"bits": 8, "sym": False},
    4: {"bits": 4, "sym": True, "group_size": 128, "ratio": 1.0},
}


def export(source: Path, target: Path, bits: int) -> None:
    """Write the model of 8 or 4 bits and what its loaders look for beside it."""
    from optimum.intel import OVModelForCausalLM, OVWeightQuantizationConfig  # type: ignore[import-not-found]

    config = OVWeightQuantizationConfig(**_QUANTIZATIONS[bits])
    model = OVModelForCausalLM.from_pretrained(source, export=True, quantization_config=config, compile=False)
    model.save_pretrained(target)


if __name__ == "__main__":
    export(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
