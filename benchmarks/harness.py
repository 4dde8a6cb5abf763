"""What every benchmark shares: the machine, figures, interleaved rounds, parts, child processes, a file per `make bench-NAME`.

A benchmark is a list of *cases* (ours and the peers') run in turn, round after round, so that drift of a noisy machine
touches all of them alike; a figure is the median over rounds. `write` puts `{machine, command, figures}` where the
documents point to, as measured; `Suite` does so for a benchmark of several parts, each on its own.
"""

from __future__ import annotations

import argparse
import asyncio
import inspect
import json
import os
import platform
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeVar

from pdmesh.models.catalogue import cache_folder
from pdmesh.models.registry import ensure_model

T = TypeVar("T")
RESULTS = Path(__file__).parent / "results"
MODEL = "smollm2-135m-instruct"
PLAIN: Mapping[str, object] = {"speculation": "none"}
"""Settings of an engine whose steps are measured, or compared with those of others: one token of a sequence in each."""
PLAIN_FLAGS = ("--speculation", "none")
"""The same as a worker's flags."""
CLOCK_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Figure:
    """One measured number. `goal` is what was asked for, `limit` the machine's in the same unit, `peer` what it ran against."""

    name: str
    value: float | str
    unit: str
    better: Literal["higher", "lower"]
    goal: float | str | None = None
    limit: float | None = None
    peer: str | None = None


@dataclass(frozen=True)
class Machine:
    """Where a result was measured."""

    cpu: str
    cores: int
    memory_gib: float
    python: str
    torch: str
    system: str


def this_machine() -> Machine:
    """Read off the machine; nothing that names it or its paths."""
    return Machine(
        cpu=_cpu_model(),
        cores=len(os.sched_getaffinity(0)),
        memory_gib=round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        python=platform.python_version(),
        torch=version("torch"),
        system=f"{platform.system()} {platform.machine()}",
    )


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or "unknown"
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")


def parser_of(program: str, doc: str | None) -> argparse.ArgumentParser:
    """Of `python -m PROGRAM`, whose `--help` begins with the first line of its docstring."""
    return argparse.ArgumentParser(prog=f"python -m {program}", description=(doc or "").partition("\n")[0])


def interleave(cases: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, float]:
    """Run every case once per round, in turn; returns the median of each."""
    samples: dict[str, list[float]] = {name: [] for name in cases}
    for number in range(rounds):
        for name, case in cases.items():
            samples[name].append(case())
            say(f"round {number + 1}/{rounds}  {name}: {samples[name][-1]:.4g}")
    return {name: statistics.median(values) for name, values in samples.items()}


def say(text: str) -> None:
    """Progress goes to stderr, so that stdout holds one line of JSON per figure."""
    print(text, file=sys.stderr, flush=True)


def show(figures: Sequence[Figure]) -> None:
    """A line of JSON for each."""
    for figure in figures:
        print(json.dumps(asdict(figure)), flush=True)


TARGETS = {
    "equality": "equality",
    "kubernetes": "bench-k8s",
    "kv_compression": "bench-kv-compression",
    "chaos": "chaos",
    "chaos_vllm": "chaos-vllm",
    "fuzz": "fuzz",
    "simulation": "simulate",
    "vllm_contract": "test-vllm",
}
"""The targets of make that write a file of results and are not called bench-NAME."""


def command_of(name: str) -> str:
    """What writes NAME.json."""
    return f"make {TARGETS.get(name, f'bench-{name}')}"


def write(name: str, figures: list[Figure], **extra: object) -> Path:
    """Write `benchmarks/results/NAME.json` and print each figure as a line of JSON."""
    show(figures)
    document = {
        "machine": asdict(this_machine()),
        "command": command_of(name),
        "figures": [asdict(figure) for figure in figures],
        **extra,
    }
    return write_document(RESULTS / f"{name}.json", document)


def write_document(path: Path, document: Mapping[str, Any]) -> Path:
    """In one move, so that a run that is cut off while it writes leaves the file before. A figure is a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f"{path.name}.part")
    beside.write_text(as_text(document))
    os.replace(beside, path)
    say(f"wrote {path.name}")
    return path


def as_text(document: Mapping[str, Any]) -> str:
    """JSON with a line for each item of its lists and mappings."""
    return "{\n" + ",\n".join(f" {json.dumps(name)}: {_in_lines(value)}" for name, value in document.items()) + "\n}\n"


def _in_lines(value: object) -> str:
    if isinstance(value, Mapping) and value:
        return "{\n" + ",\n".join(f"  {json.dumps(key)}: {json.dumps(item)}" for key, item in value.items()) + "\n }"
    if isinstance(value, list | tuple) and any(isinstance(item, Mapping | list | tuple) for item in value):
        return "[\n" + ",\n".join(f"  {json.dumps(item)}" for item in value) + "\n ]"
    return json.dumps(value)


# Goals, and tables for people.


def reached(figure: Figure) -> bool | None:
    """Whether a figure is as good as was asked for; None where nothing was asked, or it is no number. Pure."""
    if not isinstance(figure.goal, int | float) or not isinstance(figure.value, int | float):
        return None
    return figure.value >= figure.goal if figure.better == "higher" else figure.value <= figure.goal


def missed(figure: Figure) -> bool:
    """Whether there is a goal that a number falls short of. Pure."""
    return reached(figure) is False


def table(figures: Sequence[Figure], met: str = "reached") -> list[str]:
    """A line for each figure: name, value, limit and its share, the peer, what was asked for and whether it is `met`."""
    return aligned([_cells(figure, met) for figure in figures])


def _cells(figure: Figure, met: str) -> tuple[str, ...]:
    # A limit of 1 is a share already, one of 0 is the ideal of a difference.
    is_rate = figure.limit is not None and figure.limit > 1 and isinstance(figure.value, int | float)
    share = f" ({float(figure.value) / figure.limit:.2f})" if is_rate and figure.limit else ""
    limit = "" if figure.limit is None else f"limit {figure.limit:.4g}{share}"
    return figure.name, f"{_number(figure.value)} {figure.unit}", limit, figure.peer or "", _verdict(figure, met)


def _verdict(figure: Figure, met: str) -> str:
    if figure.goal is None:
        return ""
    sign = ">=" if figure.better == "higher" else "<="
    verdict = {True: met, False: "MISSED", None: "MISSED, no number"}[reached(figure)]
    return f"{sign} {_number(figure.goal)}: {verdict}"


def _number(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.4g}"


def aligned(lines: Sequence[Sequence[str]]) -> list[str]:
    """Cells in columns."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]


# Benchmarks that have several parts.

Measured = list[Figure] | Awaitable[list[Figure]]


def chosen(only: str, parts: Sequence[str]) -> list[str]:
    """Of `parts` those that `only` names, separated by commas, in their order; all, where it names none. Raises ValueError that
    lists them."""
    wanted = [name for name in only.split(",") if name] or list(parts)
    if unknown := [name for name in wanted if name not in parts]:
        raise ValueError(f"only: there is no part {unknown[0]!r}; there are {', '.join(parts)}")
    return [name for name in parts if name in wanted]


@asynccontextmanager
async def beside(work: Coroutine[Any, Any, Any]) -> AsyncIterator[None]:
    """Does it until the block ends. Raises what it failed with."""
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


@dataclass(frozen=True)
class Suite:
    """A benchmark of parts, one after the other, each of whose figures go to `NAME.json` as soon as it is through: a part that is
    measured anew replaces its own and leaves the others'. `about`: what else the file says."""

    name: str
    parts: Sequence[str]
    about: Mapping[str, str] = field(default_factory=dict)

    def parser(self, doc: str | None, **flags: str) -> argparse.ArgumentParser:
        """With `--only`, `--quick` and further switches with their help."""
        parser = parser_of(f"benchmarks.{self.name}", doc)
        parser.add_argument("--only", default="", help=f"of {','.join(self.parts)}")
        parser.add_argument("--quick", action="store_true", help="to see that all work, in short; no results are written")
        for flag, text in flags.items():
            parser.add_argument(f"--{flag}", action="store_true", help=text)
        return parser

    def chosen(self, only: str) -> list[str]:
        """See `chosen`."""
        return chosen(only, self.parts)

    def arguments(self, parser: argparse.ArgumentParser) -> tuple[argparse.Namespace, list[str]]:
        """And the parts that were chosen; ends the program where one of them is not known."""
        arguments = parser.parse_args()
        try:
            return arguments, self.chosen(arguments.only)
        except ValueError as error:
            parser.error(str(error))

    def save(self, part: str, figures: Sequence[Figure]) -> None:
        """Writes them beside the others' where the documents point to, with this machine and the command."""
        path = RESULTS / f"{self.name}.json"
        known = json.loads(path.read_text()) if path.exists() else {}
        machine = asdict(this_machine())
        # Parts may come from different machines: `machine` is that of the last one.
        machines = {**{name: known.get("machine") for name in known.get("parts", ())}, **known.get("machines", {}), part: machine}
        head = {"machine": machine, "machines": machines, "command": command_of(self.name), **self.about}
        write_document(path, {**head, **merged({**known, **head}, part, figures)})

    def main(self, names: Sequence[str], measure: Callable[[str], Measured], *, quick: bool) -> NoReturn:
        """Runs the parts of these names, and exits with 1 where one failed."""
        try:
            failed = run_parts(names, measure, None if quick else self.save)
        except (asyncio.CancelledError, KeyboardInterrupt):
            say("interrupted; what a part keeps until it is whole is not measured again")
            sys.exit(130)
        for name, why in failed.items():
            say(f"{name}: failed: {why}")
        sys.exit(1 if failed else 0)


def merged(document: Mapping[str, Any], part: str, figures: Sequence[Figure]) -> dict[str, Any]:
    """The document with these figures as those of `part`, in the order of the parts' names; `parts`: how many each has. Pure."""
    left = iter(document.get("figures", ()))
    parts = {name: [next(left) for _ in range(count)] for name, count in document.get("parts", {}).items()}
    ordered = dict(sorted({**parts, part: [asdict(figure) for figure in figures]}.items()))
    counts = {name: len(listed) for name, listed in ordered.items()}
    return {**document, "figures": [figure for listed in ordered.values() for figure in listed], "parts": counts}


def run_parts(
    names: Sequence[str], measure: Callable[[str], Measured], keep: Callable[[str, list[Figure]], None] | None
) -> dict[str, str]:
    """Measures each, prints its figures and hands them to `keep` as soon as it is through; returns what failed, and why."""
    failed: dict[str, str] = {}
    measured: list[Figure] = []
    for name in names:
        say(f"==> {name}")
        try:
            found = measure(name)
            figures = asyncio.run(cancellable(found)) if inspect.isawaitable(found) else found
        except Exception as error:  # noqa: BLE001  # one part that fails must not cost the others
            failed[name] = f"{type(error).__name__}: {error}"
            say(f"{traceback.format_exc()}{name}: failed: {failed[name]}")
            continue
        show(figures)
        if keep is not None:
            keep(name, figures)
        measured += figures
    say("\n".join(table(measured)))
    return failed


async def cancellable(work: Awaitable[T]) -> T:
    """SIGTERM is taken as Ctrl-C is: everything that was started is ended."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    return await work


@dataclass(frozen=True)
class Options:
    """What parts are told. `quick`: only to see that all work. `name`: of the benchmark."""

    name: str
    quick: bool = False

    @property
    def folder(self) -> Path:
        """Where what a part has measured so far is kept until it is whole."""
        return cache_folder() / self.name / ("quick" if self.quick else "full")

    @cached_property
    def model(self) -> Path:
        """The folder of MODEL, fetched when it is first asked for: what is simulated needs none."""
        return ensure_model(MODEL, say)

    def pick(self, full: float, quick: float) -> float:
        """The one that applies."""
        return quick if self.quick else full


class Kept:
    """Measured values of a part by name, each in a file from when it is known: an interrupted run goes on."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def get(self, name: str) -> Any | None:
        """What was kept; None: nothing was."""
        path = self._path(name)
        return json.loads(path.read_text()) if path.exists() else None

    def put(self, name: str, value: Any) -> None:
        """Whole or not at all."""
        self._folder.mkdir(parents=True, exist_ok=True)
        part = self._path(name).with_suffix(".part")
        part.write_text(json.dumps(value))
        part.rename(self._path(name))

    def forget(self) -> None:
        """Removes all of it."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def __len__(self) -> int:
        return len(list(self._folder.glob("*.json")))

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}.json"


# Processes of a measurement, and what the kernel says of them.


@dataclass(frozen=True)
class Process:
    """One Python process that talks in lines of JSON."""

    popen: subprocess.Popen[str]

    @property
    def cpu_s(self) -> float:
        """CPU time of all of its threads so far, in user and kernel."""
        return process_cpu_s(self.popen.pid)

    @property
    def rss_bytes(self) -> int:
        """Resident memory."""
        return resident_bytes(self.popen.pid)

    def hear(self) -> dict[str, Any]:
        """The next line that it says. Raises RuntimeError when it has ended."""
        assert self.popen.stdout is not None
        line = self.popen.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.popen.args!r} ended with {self.popen.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def ask(self, **command: object) -> dict[str, Any]:
        """Its answer to a line."""
        assert self.popen.stdin is not None
        self.popen.stdin.write(json.dumps(command) + "\n")
        self.popen.stdin.flush()
        return self.hear()


@contextmanager
def running(module: str, *arguments: object, ends_by_itself: bool = False) -> Iterator[Process]:
    """`python -m module arguments`, until the block ends. `ends_by_itself`: with its input; what it says of errors is shown."""
    argv, pipe = [sys.executable, "-m", module, *map(str, arguments)], subprocess.PIPE
    errors = None if ends_by_itself else subprocess.DEVNULL
    with subprocess.Popen(argv, stdin=pipe, stdout=pipe, stderr=errors, text=True) as popen:
        try:
            yield Process(popen)
        finally:
            popen.communicate() if ends_by_itself else popen.kill()


def free_ports(count: int) -> list[int]:
    """Ports of the loopback that are free now."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [one.getsockname()[1] for one in sockets]


def resident_bytes(pid: int) -> int:
    """Memory of a process. Raises OSError when it has ended."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:"))


def process_cpu_s(pid: int) -> float:
    """Time on a core of a process in whole ticks, also of threads that have ended, in user and kernel."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / CLOCK_TICKS


def process_cpu_ns(pid: int) -> int:
    """Time on a core of the threads of a process that are there now."""
    return sum(_on_cpu_ns(task) for task in Path(f"/proc/{pid}/task").iterdir())


def event_loop_cpu_ns(pid: int) -> int:
    """Time on a core of a process's main thread, which runs its event loop (a worker's engine has a thread of its own)."""
    return _on_cpu_ns(Path(f"/proc/{pid}/task/{pid}"))


def _on_cpu_ns(task: Path) -> int:
    return int((task / "schedstat").read_text().split()[0])
