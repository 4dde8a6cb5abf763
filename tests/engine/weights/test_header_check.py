"""The check of headers stands in every worker's start: what it imports is time to the first token."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.gguf_export import export
from tests.support.tiny_families import make_tiny_family

COMPILER = "torch._dynamo"


@pytest.mark.parametrize(("variant", "is_gguf"), [("gemma2", False), ("phi3", False), ("gemma2", True), ("deepseek_v3", True)])
def test_it_does_not_import_torchs_compiler(tmp_path: Path, variant: str, is_gguf: bool) -> None:
    """Joined maps and changed norms of tensors without numbers once did: more than a second."""
    folder = make_tiny_family(tmp_path / "model", variant, **({"tie_word_embeddings": True} if variant == "gemma2" else {}))
    path = export(folder, tmp_path / "model.gguf") if is_gguf else folder
    program = (
        "import sys; from pathlib import Path; from pdmesh.engine.loader.headers import check_model\n"
        f"check_model(Path(sys.argv[1])); print({COMPILER!r} in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program, str(path)], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "False\n"
