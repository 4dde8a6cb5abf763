"""Provides models by name, by folder or by file: fetched, checked, converted once, kept.

python -m pdmesh.models fetch smollm2-135m-instruct
python -m pdmesh.models list
"""

from __future__ import annotations

import argparse
import errno
import hashlib
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from pdmesh.models.catalogue import (
    DEFAULT_MODEL,
    KNOWN_MODELS,
    KnownModel,
    ModelError,
    Progress,
    building,
    cache_folder,
    exclusive,
    is_complete,
    publish,
    write_marker,
)
from pdmesh.models.download import StderrProgress, ensure_gguf, megabytes, require_space, run_reporting
from pdmesh.models.hub import PICKLES, HubName, fetch, how_to_convert
from pdmesh.runtime.child import import_path, python_command
from pdmesh.text.tokenizer_files import has_tokenizer

# Converts a GGUF file to a Hugging Face folder in the cache: float32 safetensors, config.json, tokenizer.


_NEEDED = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "generation_config.json")
_FLOAT32_BYTES = 4
# Runs with a file and a folder: converts, and prints its progress.
_PROGRAM = """
import sys
from pdmesh.engine.loader.gguf.convert import convert_gguf_weights
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


__all__ = ["DEFAULT_MODEL", "KNOWN_MODELS", "ModelError", "ensure_gguf_of", "ensure_model", "main", "model_name"]

_CHUNK_BYTES = 1 << 20


def ensure_model(name_or_path: str | Path, progress: Progress | None = None, *, offline: bool = False) -> Path:
    """Return a Hugging Face folder for a model: configuration, safetensors, tokenizer with chat template.

    Args:
        name_or_path: a known name (`KNOWN_MODELS`), which is fetched and converted into the cache once; a Hugging Face folder,
            which is returned as it is; a .gguf file, which is converted into the cache under its SHA-256; a name of the hub
            (pdmesh/models/hub.py), which is fetched into the hub's cache.
        progress: receives a line of text now and then; None shows them on standard error. Fast and silent if all is there.
        offline: of the hub, take only what is in its cache.

    Raises ModelError, which says in one sentence what is wrong and what to do. Safe in several processes at once; an interruption
    leaves nothing incomplete under a model's name."""
    if progress is not None:
        return _ensure(str(name_or_path), progress, offline=offline)
    shown = StderrProgress()
    try:
        return _ensure(str(name_or_path), shown, offline=offline)
    finally:
        shown.close()


def ensure_gguf_of(name: str, progress: Progress) -> Path:
    """Return the GGUF file of a known model as published, fetched if it is not in the cache."""
    return ensure_gguf(_known(name), progress)


def model_name(name_or_path: str | Path) -> str:
    """Return the default name under which a model is served: the known name, or the last part of the path."""
    name = str(name_or_path)
    hub_name = None if Path(name).expanduser().exists() else HubName.of(name)
    if hub_name is not None:
        return hub_name.short
    return name if name in KNOWN_MODELS else Path(name).resolve().name.removesuffix(".gguf")


def _ensure(name: str, progress: Progress, *, offline: bool) -> Path:
    path = Path(name).expanduser()
    try:
        if name in KNOWN_MODELS:
            return _ensure_known(KNOWN_MODELS[name], progress)
        if path.is_dir():
            return _checked_folder(path)
        if path.is_file():
            return _ensure_file(path.resolve(), progress)
        if (hub_name := HubName.of(name)) is not None:
            return _checked_folder(fetch(hub_name, progress, offline=offline))
    except OSError as error:
        raise ModelError(_explain_os_error(error)) from error
    _known(name)
    raise AssertionError("unreachable: _known raises")


def _known(name: str) -> KnownModel:
    if name not in KNOWN_MODELS:
        known = ", ".join(KNOWN_MODELS)
        raise ModelError(
            f"model {name!r} is neither a known name ({known}) nor a folder nor a .gguf file nor a name "
            "of the hub (OWNER/NAME); check the spelling"
        )
    return KNOWN_MODELS[name]


def _ensure_known(model: KnownModel, progress: Progress) -> Path:
    target = cache_folder() / "models" / model.name
    gguf = ensure_gguf(model, progress)
    notice = f"{model.notice}\nLicence of the weights: {model.licence}. Converted to float32 safetensors by pdmesh."
    return ensure_converted(gguf, model.sha256, target, notice, progress)


def _checked_folder(path: Path) -> Path:
    missing = [] if (path / "config.json").is_file() else ["config.json"]
    if not has_tokenizer(path):
        missing.append("tokenizer.json")
    if missing:
        raise ModelError(
            f"{path} is no model folder: it lacks {' and '.join(missing)}; name a Hugging Face folder or a .gguf file"
        )
    if not any(path.glob("*.safetensors*")) and any(file.suffix in PICKLES for file in path.iterdir()):
        raise ModelError(f"{path} has no safetensors, only {how_to_convert(str(path))}")
    return path.resolve()


def _ensure_file(path: Path, progress: Progress) -> Path:
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise ModelError(
                f"{path} is no GGUF file; name a Hugging Face folder, a .gguf file or one of {', '.join(KNOWN_MODELS)}"
            )
    check_headers(path)  # before gigabytes are read
    sha256 = _remembered_sha256(path, progress)
    notice = f"Converted from {path.name} (SHA-256 {sha256}) by pdmesh; its licence is that of the original."
    return ensure_converted(path, sha256, cache_folder() / "models" / f"gguf-{sha256}", notice, progress)


def _remembered_sha256(path: Path, progress: Progress) -> str:
    """Return the hash. Hashing gigabytes takes seconds, so the result is kept under what changes with a file's content: size and
    times."""
    stat = path.stat()
    identity = f"{path}\0{stat.st_dev}\0{stat.st_ino}\0{stat.st_size}\0{stat.st_mtime_ns}\0{stat.st_ctime_ns}"
    remembered = cache_folder() / "gguf_hashes" / hashlib.sha256(identity.encode()).hexdigest()
    if remembered.is_file():
        return remembered.read_text(encoding="ascii")
    sha256 = _sha256(path, stat.st_size, progress)
    remembered.parent.mkdir(parents=True, exist_ok=True)
    written = remembered.with_suffix(".new")
    written.write_text(sha256, encoding="ascii")
    written.replace(remembered)
    return sha256


def _sha256(path: Path, num_bytes: int, progress: Progress) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        for count, chunk in enumerate(iter(lambda: file.read(_CHUNK_BYTES), b"")):
            digest.update(chunk)
            if count % 256 == 255:
                progress(f"reading {path.name}: {megabytes(count * _CHUNK_BYTES)} of {megabytes(num_bytes)}")
    return digest.hexdigest()


def _explain_os_error(error: OSError) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"the disk of {cache_folder()} is full; free some space or name another folder in PDMESH_CACHE"
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return f"{error.filename or cache_folder()} is not writable or readable; change its permissions or set PDMESH_CACHE"
    return f"{error.filename or cache_folder()}: {error.strerror or error}; set PDMESH_CACHE if another folder is better"


# Refusal of a model by its headers before anything else starts, in a child process that keeps torch out of this one

_MODULE = "pdmesh.engine.loader.headers"


def check_headers(path: Path, overrides: Sequence[str] = ()) -> None:
    """Raise ModelError, in one line, for a folder or .gguf file that no worker can load. What pdmesh converted itself was checked
    then."""
    if not overrides and path.is_relative_to(cache_folder()):
        return
    command = python_command("-m", _MODULE, str(path), *overrides)
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **import_path()}, stdin=subprocess.DEVNULL)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        raise ModelError(lines[-1] if lines else f"{path}: its headers cannot be read (exit code {done.returncode})")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return 0 if all requested models are there, and their folders are printed."""
    parser = argparse.ArgumentParser(prog="python -m pdmesh.models", description="Fetch models into the cache ($PDMESH_CACHE).")
    commands = parser.add_subparsers(dest="command", required=True)
    fetch = commands.add_parser("fetch", help="make models ready and print their folders")
    fetch.add_argument("models", nargs="*", default=[DEFAULT_MODEL], help=f"known names or .gguf files (default {DEFAULT_MODEL})")
    commands.add_parser("list", help="known models with their licences")
    arguments = parser.parse_args(argv)
    return _list() if arguments.command == "list" else _fetch(arguments.models)


def _list() -> int:
    for model in KNOWN_MODELS.values():
        print(f"{model.name}: {model.title}, {megabytes(model.source.num_bytes)} to download, {model.licence}")
    return 0


def _fetch(models: Sequence[str]) -> int:
    try:
        for model in models:
            print(ensure_model(model))
    except ModelError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; nothing incomplete was kept", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
