"""`pdmesh up` refuses a model by its headers, in one line, before Redis, router or workers start."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.tiny_models import make_tiny_model


def up(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-c",
        "from pdmesh.cli import main; main()",
        "up",
        "--port",
        "0",
        "--http-port",
        "0",
        "--no-console",
        *arguments,
    ]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=dict(os.environ))


@pytest.mark.parametrize(
    ("change", "more", "said"),
    [
        ({"model_type": "mamba"}, (), "model_type 'mamba' is not supported: its layers have a recurrent state"),
        ({"model_type": "flux"}, (), "model_type 'flux' is not supported; this engine runs"),
        ({"use_flux": True}, (), "use_flux: not read for model_type 'llama'"),
        ({"intermediate_size": 256}, (), "down_proj.weight: shape (64, 128) in the checkpoint, (64, 256) by its config.json"),
        ({}, ("--override", "hidden_act=tangent"), "hidden_act 'tangent' is not supported"),
    ],
)
def test_one_line_before_anything_starts(tmp_path: Path, change: dict[str, object], more: tuple[str, ...], said: str) -> None:
    folder = make_tiny_model(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **change}))
    done = up("--model", str(folder), *more)
    assert done.returncode == 1
    [line] = done.stderr.splitlines()
    assert line.startswith("pdmesh up: ") and said in line
    assert not done.stdout
