"""`import pdmesh.client` stays light: no torch, no engine, no Redis; also under `python -m pdmesh --help`."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

HEAVY = ("torch", "transformers", "tokenizers", "redis", "engine", "numpy")


@pytest.mark.parametrize(
    "module", ["pdmesh.client", "pdmesh.errors", "pdmesh.cli", "pdmesh.commands.generate", "pdmesh.commands.status"]
)
def test_client_side_modules_import_nothing_heavy(module: str) -> None:
    program = f"import json, sys, {module}; print(json.dumps([m for m in {HEAVY!r} if m in sys.modules]))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert json.loads(done.stdout) == []
