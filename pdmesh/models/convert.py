"""Converts a GGUF file to a Hugging Face folder in the cache: float32 safetensors, config.json, tokenizer."""

from __future__ import annotations

import os
from pathlib import Path

from pdmesh.models.catalogue import ModelError, Progress, building, exclusive, is_complete, publish, write_marker
from pdmesh.models.download import megabytes, require_space, run_reporting
from pdmesh.runtime.child import import_path, python_command

_NEEDED = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "generation_config.json")
_FLOAT32_BYTES = 4
# Runs with a file and a folder: converts, and prints its progress.
_PROGRAM = """
import sys
from pdmesh.engine.loader.gguf import convert_gguf_weights
convert_gguf_weights(*sys.argv[1:], lambda share, text: print(f"{share:.0%}, {text}", flush=True))
"""


def ensure_converted(gguf: Path, sha256: str, target: Path, notice: str, progress: Progress) -> Path:
    """Return `target`, holding the conversion of `gguf`; converted if it does not exist yet. Raises ModelError if that fails."""
    if is_complete(target, sha256):
        return target
    with exclusive(target, progress):
        if not is_complete(target, sha256):
            _convert(gguf, sha256, target, notice, progress)
    return target


def _convert(gguf: Path, sha256: str, target: Path, notice: str, progress: Progress) -> None:
    with building(target) as folder:
        progress(f"converting {gguf.name}: tokenizer")
        num_bytes = _FLOAT32_BYTES * convert_tokenizer(gguf, folder)
        require_space(folder, num_bytes, f"to convert {gguf.name} to float32")
        convert_weights(gguf, folder, num_bytes, progress)
        missing = [name for name in _NEEDED if not (folder / name).is_file()]
        if missing:
            raise ModelError(f"{gguf.name}: the conversion made no {', '.join(missing)}; this is a defect of pdmesh, report it")
        (folder / "NOTICE").write_text(notice + "\n", encoding="utf-8")
        write_marker(folder, sha256)
        publish(folder, target)
    progress(f"converted {gguf.name} to {target}")


def convert_tokenizer(gguf_path: Path, folder: Path) -> int:
    """Write the tokenizer's files; return how many numbers the file's tensors hold. Raises ModelError: not a GGUF, or not
    covered."""
    try:
        import gguf  # heavy, and needed only to convert

        from pdmesh.text.gguf_tokenizer import write_gguf_tokenizer
    except ImportError as error:
        raise ModelError(f"the package {error.name} is needed to convert {gguf_path.name}; install pdmesh[local]") from error
    try:
        reader = gguf.GGUFReader(str(gguf_path))
        write_gguf_tokenizer({name: field.contents() for name, field in reader.fields.items()}, folder)
        return sum(int(tensor.n_elements) for tensor in reader.tensors)
    except (ValueError, LookupError) as error:
        raise ModelError(f"{gguf_path} cannot be converted: {error}") from error


def convert_weights(gguf: Path, folder: Path, num_bytes: int, progress: Progress) -> None:
    """Run the engine's converter in a child process, so that a launcher does not keep torch in memory."""
    log = folder / "convert.log"

    def report() -> None:
        said = log.read_text(encoding="utf-8", errors="replace").splitlines()[-1:]
        progress(f"converting {gguf.name}: weights to float32, {megabytes(num_bytes)}, {said[0] if said else 'starting'}")

    command = python_command("-c", _PROGRAM, str(gguf), str(folder))
    run_reporting(command, log, report, env={**os.environ, **import_path()})
    log.unlink()
