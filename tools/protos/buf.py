"""Checks the proto files with buf: `buf lint`, and `buf breaking` against the client API as it was last recorded.

`python -m tools.protos.buf` checks; with `--record` it also writes stable.binpb, after the same checks. Settings are in
protos/buf.yaml. buf comes from npm, once, into the user's cache; where it cannot be had, a message says what is not checked.

stable.binpb holds the descriptors of what calls of `pdmesh.v1.Mesh` consist of, without comments. It is committed, because a
branch or a commit to compare with is missing from a shallow clone, and on the main branch would be the same commit. Services
between routers and workers are not in it: they may change. stable.json, beside it, is the part of the promise that people read
and that needs no buf: names, numbers and types on the wire.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tools.protos.descriptors import CLIENT_SERVICE, PACKAGE, ROOT

VERSION = "1.75.0"
PROTOS = ROOT / "protos"
RECORDED = PROTOS / "pdmesh/v1/stable.binpb"
NOT_CHECKED = "not checked: style (buf lint), and whether generated code of clients would break (buf breaking)"

_INSTALL = ("npm", "install", "--ignore-scripts", "--no-audit", "--no-fund")


class BufMissing(Exception):
    """Raised when buf can neither be found nor fetched; says why."""


def buf() -> Path:
    """Return the program, fetched on first use. Raises BufMissing."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "pdmesh" / f"buf-{VERSION}"
    program = folder / "node_modules/.bin/buf"
    if not program.exists():
        _fetch(folder)
    return program


def _fetch(folder: Path) -> None:
    """Install into a folder of its own, and rename it when it is complete."""
    if shutil.which("npm") is None:
        raise BufMissing("npm is not installed")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix="buf-") as temporary:
        fresh = Path(temporary) / "buf"
        command = (*_INSTALL, "--prefix", str(fresh), f"@bufbuild/buf@{VERSION}")
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            raise BufMissing(f"npm cannot fetch @bufbuild/buf@{VERSION}:\n{done.stderr.strip()}")
        shutil.rmtree(folder, ignore_errors=True)
        fresh.rename(folder)


def image(program: Path, protos: Path = PROTOS) -> bytes:
    """Return the descriptors of the client API and of all types that it needs. Raises SystemExit if it does not compile."""
    return _run(program, "build", str(protos), "--type", f"{PACKAGE}.{CLIENT_SERVICE}", "--exclude-source-info", "-o", "-")


def check(program: Path, protos: Path = PROTOS) -> None:
    """Raise SystemExit for each line that breaks a rule of style, or code that clients generated before."""
    _run(program, "lint", str(protos))
    if RECORDED.exists():
        _run(program, "breaking", str(protos), "--against", str(RECORDED))


def _run(program: Path, *arguments: str) -> bytes:
    done = subprocess.run([program, *arguments], capture_output=True)
    if done.returncode != 0:
        raise SystemExit(f"buf {arguments[0]}:\n{done.stdout.decode()}{done.stderr.decode()}")
    return done.stdout


def main() -> None:
    """Check, and with `--record` write what was added."""
    try:
        program = buf()
    except BufMissing as missing:
        print(f"SKIPPED: {missing}\n{NOT_CHECKED}")
        return
    check(program)
    now = image(program)
    if "--record" in sys.argv[1:]:
        RECORDED.write_bytes(now)
    elif not RECORDED.exists() or RECORDED.read_bytes() != now:
        raise SystemExit(f"additions to the API are not recorded in {RECORDED.name}: run `make stubs`")
    print("buf finds nothing: style, and generated code of clients")


if __name__ == "__main__":
    main()
