"""What in the product reaches for the machine in a way that the simulation cannot replace: found in the syntax of its modules.

The simulation replaces functions where they are looked up when they are called: `time.monotonic()`, `random.random()`,
`asyncio.to_thread`. Anything else listed here would make a run depend on the machine, or on what ran before it.
"""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PACKAGES = ("router", "pdmesh", "kvtransfer", "prefill_service", "decode_service")
KINDS = {
    "clock": (
        "time.process_time", "time.process_time_ns", "time.thread_time", "time.thread_time_ns", "time.clock_gettime",
        "time.clock_gettime_ns", "time.localtime", "time.gmtime", "time.ctime", "datetime.datetime.now",
        "datetime.datetime.utcnow", "datetime.datetime.today", "datetime.date.today",
    ),
    "sleep": (
        "time.sleep", "signal.alarm", "signal.setitimer", "signal.pause", "signal.sigwait", "select.select", "select.poll",
        "select.epoll", "selectors.DefaultSelector",
    ),
    "thread": (
        "threading.Thread", "threading.Timer", "_thread.start_new_thread", "concurrent.futures.ThreadPoolExecutor",
        "multiprocessing.pool.ThreadPool", "queue.Queue", "queue.SimpleQueue",
    ),
    "process": (
        "subprocess.Popen", "subprocess.run", "subprocess.call", "subprocess.check_call", "subprocess.check_output", "os.fork",
        "os.forkpty", "os.posix_spawn", "os.posix_spawnp", "os.system", "os.popen", "os.execv", "os.execve", "os.execvp",
        "os.execvpe", "os.kill", "os.killpg", "os.waitpid", "multiprocessing.Process", "multiprocessing.get_context",
        "multiprocessing.Pool", "concurrent.futures.ProcessPoolExecutor", "asyncio.create_subprocess_exec",
        "asyncio.create_subprocess_shell",
    ),
    "socket": (
        "socket.socket", "socket.socketpair", "socket.create_connection", "socket.create_server", "socket.getaddrinfo",
        "socket.gethostbyname", "asyncio.open_connection", "asyncio.start_server", "asyncio.open_unix_connection",
        "asyncio.start_unix_server", "urllib.request.urlopen", "http.client.HTTPConnection", "http.client.HTTPSConnection",
        "grpc.insecure_channel", "grpc.secure_channel", "grpc.server", "grpc.aio.secure_channel",
    ),
    "randomness": (
        "random.SystemRandom", "secrets.SystemRandom", "secrets.token_urlsafe", "secrets.choice", "secrets.randbelow",
        "os.getrandom", "uuid.uuid1", "numpy.random", "torch.rand", "torch.randn", "torch.randint", "torch.randperm",
        "torch.multinomial", "torch.Generator",
    ),
}  # fmt: skip
KIND_OF = {name: kind for kind, names in KINDS.items() for name in names}
REPLACED = {
    "time": {"monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns", "time", "time_ns"},
    "secrets": {"token_hex", "token_bytes", "randbits"},
    "os": {"urandom"},
    "uuid": {"uuid4"},
    "random": {"Random"},
}
"""They are replaced in their modules. A name that a module has imported from there stays what it was at the import."""


@dataclass(frozen=True, order=True)
class Offence:
    """A use that cannot be replaced: in which module, of what."""

    module: str
    name: str
    kind: str
    line: int

    def __str__(self) -> str:
        return f"{self.module}, line {self.line}: {self.name} ({self.kind})"


def offences(module: str, source: str) -> list[Offence]:
    """Return what a module uses directly, in the order of its lines."""
    search = _Search(module)
    search.visit(ast.parse(source))
    return sorted(search.found, key=lambda offence: offence.line)


class _Search(ast.NodeVisitor):
    """Walks a module. Annotations use nothing, nor does what only a type checker reads."""

    def __init__(self, module: str) -> None:
        self.found: list[Offence] = []
        self._module = module
        self._imported: dict[str, str] = {}

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            first = alias.name.partition(".")[0]
            self._imported[alias.asname or first] = alias.name if alias.asname else first

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        for alias in node.names:
            self._imported[alias.asname or alias.name] = f"{node.module}.{alias.name}"
            if node.module in REPLACED and alias.name in REPLACED[node.module]:
                self.found.append(Offence(self._module, f"from {node.module} import {alias.name}", "bound", node.lineno))

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if not self._note(_dotted(node), node.lineno):
            self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> None:
        self._note(node.id, node.lineno)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_arg(self, node: ast.arg) -> None:
        pass

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self._function(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self._function(node)

    def visit_If(self, node: ast.If) -> None:
        is_for_types = (_dotted(node.test) or "").endswith("TYPE_CHECKING")
        for child in node.orelse if is_for_types else [node.test, *node.body, *node.orelse]:
            self.visit(child)

    def _function(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        for child in [*node.decorator_list, node.args, *node.body]:
            self.visit(child)

    def _note(self, dotted: str | None, line: int) -> bool:
        """Note a use of a name; return whether it is one that is listed."""
        first, _, rest = (dotted or "").partition(".")
        if first not in self._imported:
            return False
        name = f"{self._imported[first]}.{rest}" if rest else self._imported[first]
        listed = next((each for each in KIND_OF if name == each or name.startswith(f"{each}.")), None)
        if listed is not None:
            self.found.append(Offence(self._module, listed, KIND_OF[listed], line))
        return listed is not None


def _dotted(node: ast.AST) -> str | None:
    """Return a chain of names as text: `a.b.c`."""
    if isinstance(node, ast.Attribute):
        before = _dotted(node.value)
        return None if before is None else f"{before}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else None


def loaded_modules() -> Iterator[tuple[str, str]]:
    """Return the name and the file of each module of the product that this process has loaded."""
    for name, module in sorted(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if (
            name.partition(".")[0] in PACKAGES
            and file
            and file.endswith(".py")
            and not file.endswith(("_pb2.py", "_pb2_grpc.py"))
        ):
            yield name, file


def main() -> None:
    """Run a seed, and print which modules that took."""
    from tests.simulation.run import prepare
    from tests.simulation.runs import Case, run_case

    prepare()
    run_case(Case(1))
    print(json.dumps(list(loaded_modules())))


def found_in(modules: list[tuple[str, str]]) -> list[Offence]:
    """Return the offences of modules, given by name and file."""
    return [offence for name, file in modules for offence in offences(name, Path(file).read_text())]


if __name__ == "__main__":
    main()
