"""Searches for inputs that break a reader: make fuzz, or python -m tests.fuzzing --seconds 3600 --only http-chat,kv-frame.

Each target runs in a process of its own under atheris (libFuzzer with the coverage of our Python), from its seeds, the inputs
that are kept beside this file, and what earlier runs on this machine found. An input that breaks it is printed, with the command
that replays it. Results: benchmarks/results/fuzz.json.
"""

from __future__ import annotations

import argparse
import base64
import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from tests.fuzzing import corpus
from tests.fuzzing.targets import LIMIT_S, TARGETS, Target, run_one
from tests.simulation.run import with_fixed_hashes

PACKAGES = ["pdmesh", "router", "kvtransfer", "decode_service", "prefill_service"]
MEMORY_MB = 4096
MAX_BYTES = 4096
_RUNS = re.compile(rb"#(\d+)\s+\S+\s+cov: (\d+)")


@dataclass(frozen=True)
class Searched:
    """What a search came to. `broken`: inputs that are no refusals."""

    name: str
    num_runs: int
    coverage: int
    broken: tuple[bytes, ...]


def main(argv: list[str] | None = None) -> int:
    options = _options(argv)
    if options.child or options.replay or options.kept:
        with_fixed_hashes("tests.fuzzing", sys.argv[1:] if argv is None else argv)
    if options.child:
        return _search_here(TARGETS[options.child], options.arguments)
    if options.replay:
        name, _, data = options.replay.partition(":")
        run, refusals = TARGETS[name].make()
        run_one(run, refusals, base64.b64decode(data))
        return 0
    if options.kept:
        run_kept(TARGETS[options.kept])
        return 0
    names = options.only.split(",") if options.only else list(TARGETS)
    with ThreadPoolExecutor(options.jobs) as threads:
        found = list(threads.map(lambda name: search(TARGETS[name], options.seconds), names))
    if not options.only:
        _write_results(found, options.seconds)
    return int(any(each.broken for each in found))


def run_kept(target: Target) -> None:
    """Run the seeds of a target and the inputs that are kept, in this process. Raises what they raise."""
    run, refusals = target.make()
    for data in (*target.seeds, *corpus.read(target.name)):
        try:
            run_one(run, refusals, data)
        except BaseException:
            _say(f"    python -m tests.fuzzing --replay {target.name}:{base64.b64encode(data).decode()}")
            raise


def search(target: Target, seconds: float) -> Searched:
    """Search for so long, or until an input breaks the target; keep what it found."""
    from pdmesh.models.catalogue import cache_folder

    folder = cache_folder() / "fuzz" / target.name
    inputs, broken = folder / "inputs", folder / "broken"
    corpus.put(inputs, (*target.seeds, *corpus.read(target.name)))
    broken.mkdir(exist_ok=True)
    before = set(broken.iterdir())
    limits = (f"-max_total_time={seconds:.0f}", f"-timeout={LIMIT_S}", f"-rss_limit_mb={MEMORY_MB}", f"-max_len={MAX_BYTES}")
    log = _child(target, *limits, f"-artifact_prefix={broken}/", str(inputs))
    corpus.write(target.name, (path.read_bytes() for path in inputs.iterdir()))  # each has reached something new
    counts = [(int(runs), int(coverage)) for runs, coverage in _RUNS.findall(log)]
    new = tuple(path.read_bytes() for path in sorted(set(broken.iterdir()) - before))
    num_runs, coverage = (counts[-1][0], max(coverage for _, coverage in counts)) if counts else (0, 0)
    if not counts:
        _say(log[-3000:].decode(errors="replace"))
    _say(f"{target.name}: {num_runs} inputs, coverage {coverage}, {len(new)} broken")
    for data in new:
        _say(_trace(log))
        _say(f"    python -m tests.fuzzing --replay {target.name}:{base64.b64encode(data).decode()}")
    return Searched(target.name, num_runs, coverage, new)


def _child(target: Target, *arguments: str) -> bytes:
    """Run libFuzzer in a process of its own; return what it said."""
    command = [sys.executable, "-m", "tests.fuzzing", "--child", target.name, *arguments]
    return subprocess.run(command, capture_output=True, check=False).stderr


def _search_here(target: Target, arguments: Iterable[str]) -> int:
    import atheris  # type: ignore[import-untyped]  # only `make fuzz` installs it

    logging.disable(logging.CRITICAL)
    with atheris.instrument_imports(include=PACKAGES):
        run, refusals = target.make()

    def one(data: bytes) -> None:
        run_one(run, refusals, data)

    atheris.Setup([sys.argv[0], *arguments], one)
    atheris.Fuzz()
    return 0


def _trace(log: bytes) -> str:
    """Return the traceback in what libFuzzer said, or its end."""
    text = log.decode(errors="replace")
    start = text.rfind("Uncaught Python exception")
    return text[start : start + 4000] if start >= 0 else text[-2000:]


def _write_results(found: list[Searched], seconds: float) -> None:
    from benchmarks.harness import Figure, write

    write(
        "fuzz",
        [
            Figure("readers that were searched", len(found), "readers", "higher"),
            Figure("seconds for each", seconds, "s", "higher", 3600),
            Figure("inputs", sum(each.num_runs for each in found), "inputs", "higher"),
            Figure("inputs that broke a reader", sum(len(each.broken) for each in found), "inputs", "lower", 0),
        ],
        readers={each.name: {"inputs": each.num_runs, "coverage": each.coverage} for each in found},
    )


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _options(argv: list[str] | None) -> Any:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzzing")
    parser.add_argument("--seconds", type=float, default=3600, help="for each target")
    parser.add_argument("--only", default="", help=f"of {','.join(TARGETS)}")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="targets that are searched at a time")
    parser.add_argument("--replay", default="", metavar="TARGET:BASE64", help="run one input")
    parser.add_argument("--kept", default="", choices=["", *TARGETS], metavar="TARGET", help="run what is kept of a target")
    parser.add_argument("--child", default="", help=argparse.SUPPRESS)
    options, rest = parser.parse_known_args(argv)
    options.arguments = rest
    unknown = set(filter(None, options.only.split(","))) - TARGETS.keys()
    if unknown or (options.arguments and not options.child):
        parser.error(f"unknown: {', '.join([*sorted(unknown), *options.arguments])}")
    return options


if __name__ == "__main__":
    raise SystemExit(main())
