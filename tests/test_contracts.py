"""Small images: what must not need torch starts without it, in a process of its own, lazy imports included."""

import subprocess
import sys

import pytest

TORCH_FREE = [
    "router.main",
    "pdmesh.simulator.main",
    "pdmesh.autoscaler.policy.policy",
    "pdmesh.text.tokenizer",
    "pdmesh.text.detokenizer",
    "pdmesh.client",
    "pdmesh.console.main",
    "pdmesh.runtime.rpc.server",
    "pdmesh.runtime.registry.registry",
]
HEAVY = ["torch", "transformers", "pdmesh.engine"]


@pytest.mark.parametrize("module", TORCH_FREE)
def test_starts_without_torch(module: str) -> None:
    program = f"import sys, {module}\nprint(sorted(name for name in {HEAVY!r} if name in sys.modules))"
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert shown.stdout.strip() == "[]"


def test_client_needs_only_grpc() -> None:
    others = ["redis", "tokenizers", "jinja2", "numpy"]
    program = f"import sys, pdmesh.client\nprint(sorted(name for name in {others!r} if name in sys.modules))"
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert shown.stdout.strip() == "[]"
