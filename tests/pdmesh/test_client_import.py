"""`import pdmesh.client` stays light: no torch, no engine, no Redis; also under `python -m pdmesh --help`."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

HEAVY = ("torch", "transformers", "tokenizers", "redis", "pdmesh.engine", "numpy", "cryptography")
# What an installation without extras must do without.
EXTRA = (*HEAVY, "rich")


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        *((module, EXTRA) for module in ("pdmesh.client.client", "pdmesh.errors", "pdmesh.cli")),
        *((module, EXTRA) for module in ("pdmesh.commands.generate", "pdmesh.commands.chat")),
        ("pdmesh.commands.status", HEAVY),
    ],
)
def test_client_side_modules_import_nothing_heavy(module: str, absent: tuple[str, ...]) -> None:
    program = f"import json, sys, {module}; print(json.dumps([m for m in {absent!r} if m in sys.modules]))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert json.loads(done.stdout) == []


WITHOUT_RICH = """
import sys
sys.modules["rich"] = None
from pdmesh import cli
sys.exit(cli.run(sys.argv[1:]))
"""


@pytest.mark.parametrize(
    ("argv", "extra"),
    [
        (["status"], "cli"),
        (["doctor"], "cli"),
        (["generate", "x", "--timings"], "cli"),
        (["chat", "x", "--timings"], "cli"),
        (["up"], "local"),
        (["plan"], "services"),
    ],
)
def test_a_command_that_needs_more_than_the_client_says_what_to_install(argv: list[str], extra: str) -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_RICH, *argv], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1 and done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"pdmesh {argv[0]}: ") and line.endswith(f"pip install 'pdmesh[{extra}]'")
