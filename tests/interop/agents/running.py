"""Runs each library's program against the gateway, one after the other."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.harness import Figure, say
from benchmarks.peers.environments import PeerError, child_environment, ensure_environment
from tests.interop.agents.catalogue import LIBRARIES, Library
from tests.interop.agents.checks import Asked
from tests.interop.agents.node import ensure_packages
from tests.interop.site import Site

RUN_TIMEOUT_S = 300.0


@dataclass(frozen=True)
class Tried:
    """What a library asked and got; `problem` if it could not take part."""

    name: str
    asked: tuple[Asked, ...] = ()
    problem: str = ""

    def as_rows(self) -> list[dict[str, str]]:
        """For the file of results."""
        return [{"library": self.name, **asdict(asked)} for asked in self.asked]


def run_all(site: Site) -> list[Tried]:
    """Every library of the catalogue."""
    tried = []
    for library in LIBRARIES:
        tried.append(run(library, site))
        say(f"{library.name}: {tried[-1].problem or [asked.problem or 'ok' for asked in tried[-1].asked]}")
    return tried


def run(library: Library, site: Site) -> Tried:
    """One library's program."""
    try:
        return Tried(library.name, _ask(_command(library), site))
    except PeerError as error:
        return Tried(library.name, problem=str(error))


def _command(library: Library) -> list[str]:
    """Return the command of a program, but for its options; what it needs is installed first."""
    if library.is_node:
        return ["node", str(ensure_packages("agents-npm", say) / library.program)]
    python = ensure_environment(library.environment, say) if library.environment else Path(sys.executable)
    return [str(python), "-m", f"tests.interop.agents.{library.program}"]


def _ask(command: Sequence[str], site: Site) -> tuple[Asked, ...]:
    options = json.dumps({"url": site.http, "model": site.model})
    try:
        done = subprocess.run(
            [*command, options],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=RUN_TIMEOUT_S,
            env=child_environment(),
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise PeerError(f"had not ended after {RUN_TIMEOUT_S:g} s") from None
    if done.returncode or not done.stdout.strip():
        raise PeerError(f"ended with code {done.returncode}: {done.stderr[-300:]}")
    return tuple(Asked(**row) for row in json.loads(done.stdout.strip().splitlines()[-1]))


def figures_of(tried: Sequence[Tried]) -> list[Figure]:
    """How many checks of each library were right. Pure."""
    return [_figure(one) for one in tried]


def _figure(tried: Tried) -> Figure:
    name = f"{tried.name}: checks right"
    if tried.problem:
        return Figure(name, f"none: {tried.problem}", "", "higher", goal=1)
    total = len(tried.asked)
    return Figure(name, sum(not asked.problem for asked in tried.asked), f"of {total}", "higher", goal=total)
