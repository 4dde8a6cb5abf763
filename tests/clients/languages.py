"""How the clients of each language are built and run, and what that needs.

Everything is generated from protos/ into `build/` and `node_modules/` beside the sources, which git ignores.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CLIENTS = ROOT / "clients"
PROTOS = ROOT / "protos"
FILES = ("pdmesh/v1/mesh.proto", "pdmesh/v1/common.proto", "pdmesh/v1/worker.proto")
JARS, GOPATH = Path("/usr/share/java"), Path("/usr/share/gocode")
NETTY = (
    "buffer", "codec", "codec-http", "codec-http2", "codec-socks", "common", "handler", "handler-proxy", "resolver", "transport",
    "transport-native-unix-common",
)  # fmt: skip
OLDEST_NODE = (20, 3)

Command = tuple[str, ...]


@dataclass(frozen=True)
class Question:
    """Hold what every example is to ask."""

    router: str
    prompt: str
    seed: int
    max_tokens: int


@dataclass(frozen=True)
class Language:
    """Describe the client of a language. `needs`: what has to be there, and the Debian package that brings it. `too_old`: says
    what is there in a version that will not do."""

    name: str
    folder: Path
    needs: Mapping[str, str]
    build: Callable[[], Iterator[Command]]
    example: Callable[[Question], Command]
    tests: Command = ()
    env: Mapping[str, str] = field(default_factory=dict)
    too_old: Callable[[], str] = str

    @property
    def missing(self) -> dict[str, str]:
        """Return what is needed and is not here."""
        return {what: package for what, package in self.needs.items() if not (shutil.which(what) or (JARS / what).exists())}


def _typescript() -> Language:
    folder = CLIENTS / "typescript"
    installed, lock = folder / "node_modules/.package-lock.json", folder / "package-lock.json"

    def build() -> Iterator[Command]:
        if not installed.exists() or installed.stat().st_mtime < lock.stat().st_mtime:
            yield "npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund"
        yield "npm", "run", "--silent", "build"
        yield "npm", "run", "--silent", "lint"

    def example(question: Question) -> Command:
        return "node", "dist/examples/generate.js", *_arguments(question)

    tests = ("node", "--test", *(f"dist/test/{name}.test.js" for name in ("retrier", "session", "client", "mesh")))

    def too_old() -> str:
        shown = subprocess.run(["node", "--version"], capture_output=True, text=True, check=True).stdout.strip()
        version = tuple(int(number) for number in shown.removeprefix("v").split(".")[:2])
        return "" if version >= OLDEST_NODE else f"node {shown}, and {'.'.join(map(str, OLDEST_NODE))} is needed"

    return Language("TypeScript", folder, {"node": "nodejs", "npm": "npm"}, build, example, tests, too_old=too_old)


def _go() -> Language:
    folder = CLIENTS / "go"
    out = folder / "build"

    def build() -> Iterator[Command]:
        (out / "src").mkdir(parents=True, exist_ok=True)
        yield "protoc", f"-I{PROTOS}", f"--go_out={out}/src", f"--go-grpc_out={out}/src", *FILES
        yield "go", "build", "-o", str(out / "generate"), "."

    def example(question: Question) -> Command:
        flags = (f"-seed={question.seed}", f"-max-tokens={question.max_tokens}")
        return str(out / "generate"), *flags, question.router, question.prompt

    needs = {
        "go": "golang-go",
        "protoc": "protobuf-compiler",
        "protoc-gen-go": "protoc-gen-go",
        "protoc-gen-go-grpc": "protoc-gen-go-grpc",
        f"{GOPATH}/src/google.golang.org/grpc": "golang-google-grpc-dev",
        # Version 1.3, which that package brings by itself, cannot marshal what protoc-gen-go generates.
        f"{GOPATH}/src/github.com/golang/protobuf/proto/wire.go": "golang-github-golang-protobuf-1-5-dev",
    }
    # The libraries are Debian's, which are no modules.
    env = {"GO111MODULE": "off", "GOPATH": f"{out}{os.pathsep}{GOPATH}"}
    return Language("Go", folder, needs, build, example, env=env)


def _java() -> Language:
    folder = CLIENTS / "java"
    out, classes = folder / "build", folder / "build/classes"
    needs = {
        "javac": "default-jdk-headless",
        "protoc": "protobuf-compiler",
        "grpc_java_plugin": "protobuf-compiler-grpc-java-plugin",
        "protobuf.jar": "libprotobuf-java",
        **dict.fromkeys(
            (f"grpc-{name}.jar" for name in ("api", "context", "core", "netty", "protobuf", "protobuf-lite", "stub")),
            "libgrpc-java",
        ),
        **dict.fromkeys((f"netty-{name}.jar" for name in NETTY), "libnetty-java"),
        "guava.jar": "libguava-java",
        "perfmark-api.jar": "libperfmark-java",
        "geronimo-annotation-1.3-spec.jar": "libgeronimo-annotation-1.3-spec-java",
    }
    path = os.pathsep.join([str(classes), *(str(JARS / jar) for jar in needs if jar.endswith(".jar"))])

    def build() -> Iterator[Command]:
        shutil.rmtree(out, ignore_errors=True)
        classes.mkdir(parents=True)
        plugin = f"--plugin=protoc-gen-grpc-java={shutil.which('grpc_java_plugin')}"
        yield "protoc", f"-I{PROTOS}", plugin, f"--java_out={out}", f"--grpc-java_out={out}", *FILES
        sources = sorted(str(source) for source in out.rglob("*.java"))
        yield "javac", "-nowarn", "-d", str(classes), "-cp", path, "Generate.java", *sources

    def example(question: Question) -> Command:
        return "java", "-cp", path, "Generate", *_arguments(question)

    return Language("Java", folder, needs, build, example)


def _arguments(question: Question) -> Command:
    return question.router, question.prompt, str(question.seed), str(question.max_tokens)


LANGUAGES = (_typescript(), _go(), _java())
