"""Carries out the stages of the Dockerfile, each once."""

from __future__ import annotations

import hashlib
import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.cluster.images.chroots import Layer, debian, mounted, remove, run
from tests.k8s.dockerfile import ROOT, Stage, is_sent, stages

RELEASE = "bookworm"  # of the image that FROM names
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class Builder:
    """Layers below `folder`; a stage whose text, base and sources are as before is not made again."""

    def __init__(self, folder: Path, binds: Sequence[Path], arguments: Mapping[str, str]) -> None:
        self._folder = folder
        self._binds = {bind: str(bind) for bind in binds}
        self._arguments = arguments
        self._stages = stages()
        self._done: dict[str, Layer] = {}

    def build(self, name: str) -> Layer:
        """A stage with all that it needs. Raises RuntimeError."""
        if name not in self._done:
            self._done[name] = self._made(self._stages[name])
        return self._done[name]

    def size(self, name: str) -> int:
        """Bytes of an image's files above its Debian."""
        stage = self._stages[name]
        return self.build(name).size() + (self.size(stage.base) if stage.base in self._stages else 0)

    def _made(self, stage: Stage) -> Layer:
        sources = [self.build(match[1]) for copy in stage.of("COPY") if (match := re.match(r"--from=(\S+)", copy))]
        layer = self._start(stage)
        mark, key = layer.folder / "key", self._key(stage, layer, sources)
        if not mark.exists() or mark.read_text() != key:
            remove(layer.folder)
            layer.upper.mkdir(parents=True)
            self._carry_out(stage, layer, with_files=True)
            mark.write_text(key)
        else:
            self._carry_out(stage, layer, with_files=False)
        return layer

    def _start(self, stage: Stage) -> Layer:
        folder = self._folder / "stages" / stage.name
        if stage.base not in self._stages:
            return Layer(folder, [debian(self._folder, RELEASE)], {"PATH": PATH})
        base = self.build(stage.base)
        return Layer(folder, [base.upper, *base.below], dict(base.env), base.workdir, base.user)

    def _carry_out(self, stage: Stage, layer: Layer, *, with_files: bool) -> None:
        arguments: dict[str, str] = {}
        binds = self._binds if with_files else {}
        with mounted(layer, binds) as root:
            for name, text in stage.steps:
                if name == "ARG":
                    key, _, default = text.partition("=")
                    arguments[key] = self._arguments.get(key, default)
                elif name in ("COPY", "RUN", "WORKDIR"):
                    self._step(name, text, layer, root, arguments, with_files=with_files)
                else:
                    _setting(name, text, layer)
        for place in binds.values():  # an empty folder where it was
            remove(layer.upper / place.lstrip("/"))

    def _step(self, name: str, text: str, layer: Layer, root: Path, arguments: dict[str, str], *, with_files: bool) -> None:
        if name == "WORKDIR":
            layer.workdir = text
            (root / text.lstrip("/")).mkdir(parents=True, exist_ok=True)
        elif with_files and name == "COPY":
            self._copy(text.split(), layer, root)
        elif with_files:
            run(root, layer, text, arguments)

    def _copy(self, words: list[str], layer: Layer, root: Path) -> None:
        target = root / layer.workdir.lstrip("/") if words[-1] in (".", "./") else root / words[-1].lstrip("/")
        if not words[-1].startswith("/"):
            target = root / layer.workdir.lstrip("/") / words[-1]
        if words[0].startswith("--from="):
            with mounted(self.build(words[0].removeprefix("--from="))) as other:
                target.parent.mkdir(parents=True, exist_ok=True)
                subprocess.run(["cp", "-a", "-T", str(other / words[1].lstrip("/")), str(target)], check=True)
            return
        for path in _context(words[:-1]):
            single = len(words) == 2 and words[0] != "." and (ROOT / words[0]).is_dir()
            place = target / (path.removeprefix(f"{words[0]}/") if single else path)
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / path, place)

    def _key(self, stage: Stage, layer: Layer, sources: Sequence[Layer]) -> str:
        digest = hashlib.sha256(json.dumps([stage.base, stage.steps, sorted(self._arguments.items())]).encode())
        for below in [*layer.below[:-1], *(source.upper for source in sources)]:
            digest.update((below.parent / "key").read_bytes())
        for copy in stage.of("COPY"):
            for path in _context(copy.split()[:-1]) if not copy.startswith("--from") else ():
                digest.update(path.encode() + (ROOT / path).read_bytes())
        return digest.hexdigest()


def _setting(name: str, text: str, layer: Layer) -> None:
    if name == "ENV":
        for assignment in shlex.split(text):
            key, _, value = assignment.partition("=")
            layer.env[key] = re.sub(r"\$(\w+)", lambda match: layer.env.get(match[1], ""), value)
    elif name == "USER":
        layer.user = text
    elif name == "CMD":
        layer.command = json.loads(text)
    elif name != "EXPOSE":
        raise RuntimeError(f"{name}: not known here; teach it to tests/cluster/images/build.py")


def _context(sources: Sequence[str]) -> list[str]:
    """What of the checkout's files the builder is sent and the sources take."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    taken = [path for path in listed if any(each in (".", path) or path.startswith(f"{each}/") for each in sources)]
    return [path for path in taken if is_sent(path) and (ROOT / path).is_file()]
