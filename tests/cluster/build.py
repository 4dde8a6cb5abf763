"""Builds a real Kubernetes control plane, once, into the user's cache, from Debian's own packages and without root.

    $XDG_CACHE_HOME/pdmesh/kubernetes-1.20.2/bin/     etcd, kube-apiserver, kube-controller-manager, kube-scheduler, kubectl
                                        .../work/     what it is built in; kept when a build is cut off, removed at its end

Debian 12 (bookworm) has the source with everything that it needs (package `kubernetes`), a Go that compiles it (`golang-1.19`)
and etcd ready-made. They are unpacked, not installed. What is done is not done again: a step leaves its result by one rename.

    python -m tests.cluster.build [--folder FOLDER]          takes some minutes of two cores; prints the folder of the programs
"""

from __future__ import annotations

import argparse
import fcntl
import os
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.cluster.debian import KEYRING, Apt, BuildFailed, run, say, unpacked

VERSION = "1.20.2"
SERVERS = ("kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubectl")
PROGRAMS = ("etcd", *SERVERS)
NEEDED_TOOLS = ("apt-get", "dpkg-deb", "dpkg-source")
NEEDED_SPACE_MB = 4000
_MODULE = "k8s.io/kubernetes"
_OPENAPI = "pkg/generated/openapi"
_GO_DEBS = ("golang-1.19-go", "golang-1.19-src")
# The one library of the source that is older than this Go: with the copy in vendor/, walking over a map writes where it should
# not, and the server falls at the first custom resource.
_REFLECT = "github.com/modern-go/reflect2"
_REFLECT_DEB = "golang-github-modern-go-reflect2-dev"


@dataclass(frozen=True)
class Cache:
    """Where things are."""

    root: Path

    @property
    def programs(self) -> Path:
        """The finished programs."""
        return self.root / "bin"

    @property
    def work(self) -> Path:
        """Packages, sources, Go and its cache."""
        return self.root / "work"

    @property
    def source(self) -> Path:
        """Kubernetes' source tree, where Go in GOPATH mode looks for it."""
        return self.work / "gopath/src" / _MODULE

    @property
    def go(self) -> Path:
        """Go's own tree."""
        return self.work / "golang/usr/lib/go-1.19"

    def is_complete(self) -> bool:
        """Whether all programs are there."""
        return all(os.access(self.programs / name, os.X_OK) for name in PROGRAMS)


def default_cache() -> Cache:
    """Of this user."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Cache(Path(base).expanduser() / "pdmesh" / f"kubernetes-{VERSION}")


def build(cache: Cache) -> Path:
    """The folder with all programs; builds what is missing. Raises BuildFailed."""
    if cache.is_complete():
        return cache.programs
    _check_machine(cache)
    with _locked(cache.root):
        if not cache.is_complete():
            _build_all(cache)
    return cache.programs


def _build_all(cache: Cache) -> None:
    cache.programs.mkdir(parents=True, exist_ok=True)
    apt = Apt(cache.work / "apt")
    _unpack_etcd(cache, apt)
    _unpack_go(cache, apt)
    _unpack_source(cache, apt)
    _generate_openapi(cache)
    for name in SERVERS:
        _compile(cache, name)
    shutil.rmtree(cache.work)


def _check_machine(cache: Cache) -> None:
    """Raises BuildFailed naming what this machine lacks."""
    if sys.platform != "linux" or os.uname().machine not in ("x86_64", "aarch64"):
        raise BuildFailed(f"Debian's packages are for Linux on x86_64 or aarch64; this is {sys.platform} on {os.uname().machine}")
    if missing := [tool for tool in NEEDED_TOOLS if shutil.which(tool) is None]:
        raise BuildFailed(f"missing: {', '.join(missing)} (Debian packages apt, dpkg, dpkg-dev); the build fetches from Debian")
    if not Path(KEYRING).exists():
        raise BuildFailed(f"missing: {KEYRING} (Debian package debian-archive-keyring), which vouches for what is fetched")
    cache.root.mkdir(parents=True, exist_ok=True)
    if (free_mb := shutil.disk_usage(cache.root).free >> 20) < NEEDED_SPACE_MB:
        raise BuildFailed(
            f"{cache.root} has {free_mb} MB free; the build needs {NEEDED_SPACE_MB} MB, most of it for its duration"
        )


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """One build at a time; who comes second waits and finds it done."""
    with (folder / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _unpack_etcd(cache: Cache, apt: Apt) -> None:
    if (cache.programs / "etcd").exists():
        return
    say("fetching etcd")
    files = unpacked(apt.packages("etcd-server"), cache.work / "etcd")
    _install(files / "usr/bin/etcd", cache.programs / "etcd")


def _unpack_go(cache: Cache, apt: Apt) -> None:
    if cache.go.exists():
        return
    say("fetching Go 1.19")
    unpacked(apt.packages(*_GO_DEBS), cache.work / "golang")


def _unpack_source(cache: Cache, apt: Apt) -> None:
    if cache.source.exists():
        return
    say("fetching Kubernetes' source")
    partial = cache.work / "source.partial"
    shutil.rmtree(partial, ignore_errors=True)
    run(["dpkg-source", "--extract", "--no-check", str(apt.source("kubernetes")), str(partial)])
    # Links to the system's folders, for a Debian build; ours has all that is needed in vendor/.
    _link_staging(partial)
    _replace_reflection(partial, unpacked(apt.packages(_REFLECT_DEB), cache.work / "reflect2"))
    cache.source.parent.mkdir(parents=True, exist_ok=True)
    partial.rename(cache.source)


def _link_staging(source: Path) -> None:
    """vendor/k8s.io/NAME leads to staging/src/k8s.io/NAME, as in the project's own tree."""
    for folder in (source / "staging/src/k8s.io").iterdir():
        link = source / "vendor/k8s.io" / folder.name
        if folder.is_dir() and not link.exists():
            link.symlink_to(Path("../../staging/src/k8s.io") / folder.name)


def _replace_reflection(source: Path, package: Path) -> None:
    target = source / "vendor" / _REFLECT
    for old in target.glob("*.go"):
        old.unlink()
    for new in (package / "usr/share/gocode/src" / _REFLECT).iterdir():
        if new.is_file():
            shutil.copy2(new, target / new.name)


def _generate_openapi(cache: Cache) -> None:
    """The one file that the source package lacks: what `make generated_files` would write for the API server."""
    target = cache.source / _OPENAPI / "zz_generated.openapi.go"
    if target.exists():
        return
    say("generating the API's schema")
    generator = cache.work / "openapi-gen"
    _go(cache, "build", "-o", str(generator), "./vendor/k8s.io/kube-openapi/cmd/openapi-gen")
    inputs = ",".join(_tagged_packages(cache.source))
    flags = ["-O", "zz_generated.openapi.partial", "-p", f"{_MODULE}/{_OPENAPI}", "-r", str(cache.work / "violations")]
    header = cache.work / "header.txt"
    header.write_text("", encoding="utf-8")
    run([str(generator), "-h", str(header), "-i", inputs, *flags], cwd=cache.source, env=_go_environment(cache))
    target.with_name("zz_generated.openapi.partial.go").rename(target)


def _tagged_packages(source: Path) -> list[str]:
    """Import paths of all packages that ask for a schema."""
    found = set()
    for root in ("pkg", "staging/src/k8s.io"):
        for path in (source / root).rglob("*.go"):
            if "+k8s:openapi-gen=true" in path.read_text(encoding="utf-8", errors="replace"):
                found.add(path.parent.relative_to(source).as_posix())
    paths = {
        path.replace("staging/src/", f"{_MODULE}/vendor/") if path.startswith("staging") else f"{_MODULE}/{path}"
        for path in found
    }
    return sorted(path for path in paths if "/testdata" not in path and "code-generator" not in path)


def _compile(cache: Cache, name: str) -> None:
    target = cache.programs / name
    if target.exists():
        return
    say(f"compiling {name}")
    started = time.monotonic()
    stamp = " ".join(f"-X {package}.{setting}" for package in _VERSIONS for setting in _STAMP)
    built = cache.work / name
    _go(cache, "build", "-trimpath", "-ldflags", f"-s -w {stamp}", "-o", str(built), f"./cmd/{name}")
    _install(built, target)
    say(f"compiled {name} in {time.monotonic() - started:.0f} s")


# What the program says of itself, and what the API server answers (helm asks it).
_VERSIONS = tuple(f"{_MODULE}/vendor/k8s.io/{name}" for name in ("component-base/version", "client-go/pkg/version"))
_STAMP = (f"gitVersion=v{VERSION}", "gitMajor=1", "gitMinor=20", "gitTreeState=clean")


def _install(built: Path, target: Path) -> None:
    partial = target.with_name(f".{target.name}.partial")
    shutil.copy2(built, partial)
    partial.chmod(0o755)
    partial.rename(target)


def _go(cache: Cache, *arguments: str) -> None:
    run([str(cache.go / "bin/go"), *arguments], cwd=cache.source, env=_go_environment(cache))


def _go_environment(cache: Cache) -> dict[str, str]:
    return {
        "GOROOT": str(cache.go),
        "GOPATH": str(cache.work / "gopath"),
        "GOCACHE": str(cache.work / "gocache"),
        "GOTMPDIR": str(cache.work),
        "GO111MODULE": "off",
        "CGO_ENABLED": "0",
        "GOFLAGS": "",
        "PATH": f"{cache.go / 'bin'}:{os.environ.get('PATH', '')}",
    }


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.cluster.build", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--folder", type=Path, help="of the cache; default: the user's")
    folder = parser.parse_args().folder
    try:
        print(build(Cache(folder.resolve()) if folder else default_cache()))
    except BuildFailed as error:
        raise SystemExit(f"no control plane: {error}") from None


if __name__ == "__main__":
    main()
