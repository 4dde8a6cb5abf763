"""`make demo-without`: a real mesh for each capability that is missing alone, and its tokens beside those of a mesh that has all.

    python -m tests.platform.end_to_end [CAPABILITY ...]     all of them by default; some ten seconds each

`pdmesh up` starts launcher, Redis, router, a prefill and a decode worker on real weights. Three requests go through the hand-off,
greedy and drawn, short and longer than a block. A line for each capability says whether the tokens are the same, how the KV went
and how many processes there were; the exit status is 1 unless all have the same tokens and have ended without a trace.

Without `cpu_tiers` or `proc` the kernels run in portable code, whose bits are not those of other tiers: their tokens are compared
with those of a mesh that has everything and computes in portable code, too.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pdmesh.client.client import Client
from pdmesh.client.types import Generation
from pdmesh.errors import MeshError
from pdmesh.platform import capabilities
from pdmesh.platform.capabilities import CAPABILITIES, VARIABLE
from pdmesh.runtime.child import import_path, python_command
from tests.mesh.checks import shared_memory_names
from tests.support.up_command import UpCommand

PROGRAM = tuple(python_command("-m", "pdmesh"))
NUM_TOKENS = 24
SHORT = "The capital of France is"
LONG = "A mesh of services computes a prompt in one place and continues it in another. " * 12
PORTABLE = frozenset({"cpu_tiers", "proc"})
NEEDED_BY_SHM = frozenset({"memfd", "abstract_sockets", "peer_credentials"})
_START_S = 600.0  # the portable kernels are compiled once


class Failed(Exception):
    """A mesh did not answer, or left something behind. The message says which, with what it printed."""


@dataclass(frozen=True)
class Run:
    """What a mesh answered: the tokens of each request, the transport of each hand-off; its workers' numeric modes, and how many
    processes it had."""

    tokens: tuple[tuple[int, ...], ...]
    transports: frozenset[str]
    modes: frozenset[str]
    num_processes: int


def run(missing: str, **variables: str) -> Run:
    """Return what a mesh answers without the capability, with these environment variables; empty: with all capabilities. Raises
    Failed."""
    segments = shared_memory_names()
    with tempfile.TemporaryDirectory(prefix="pdmesh-without-") as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        environment = {**os.environ, **import_path(), **variables, VARIABLE: missing}
        timeout = ("--start-timeout-s", f"{_START_S:g}")
        mesh = stack.enter_context(UpCommand(PROGRAM, cwd=folder, folder=folder, env=environment, arguments=timeout))
        try:
            mesh.wait_listening()
            answers, modes = _answers(mesh)
            mesh.wait_ready()
            num_processes = len(mesh.pids())
            if (code := mesh.end(signal.SIGINT)) != 0:
                raise Failed(f"it ended with {code}")
            left = [*mesh.leftovers(), *(each for each in shared_memory_names() - segments if "pdmesh" in each)]
        except (AssertionError, MeshError, Failed) as error:
            raise Failed(f"{type(error).__name__}: {error}\n{mesh.output}") from error
    if left:
        raise Failed(f"left behind: {', '.join(left)}")
    tokens = tuple(answer.token_ids for answer in answers)
    return Run(tokens, frozenset(answer.timings.transport for answer in answers), modes, num_processes)


def _answers(mesh: UpCommand) -> tuple[list[Generation], frozenset[str]]:
    with Client(f"127.0.0.1:{mesh.port}", retry_overload=True) as client:
        modes = _modes_when_ready(client, mesh)
        answers = [
            client.generate(SHORT, temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, mode="remote", timeout=120),
            client.generate(LONG, temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, mode="remote", timeout=120),
            client.generate(LONG, temperature=1.0, seed=7, max_tokens=NUM_TOKENS, ignore_eos=True, mode="remote", timeout=120),
        ]
    return answers, modes


def _modes_when_ready(client: Client, mesh: UpCommand) -> frozenset[str]:
    ends = time.monotonic() + _START_S
    while len(ready := [worker for worker in client.status(timeout=30).workers if worker.alive]) < 2:
        if time.monotonic() > ends or mesh.process.poll() is not None:
            raise Failed(f"not ready after {_START_S:g} s")
        time.sleep(0.2)
    return frozenset(worker.info.identity.numeric_mode for worker in ready)


def differences(missing: str, found: Run, whole: Run) -> list[str]:
    """Return in what a run without the capability is not as it has to be, in words; empty: in nothing. Pure.

    Transport, numeric mode and number of processes show that the capability was missing where that can be seen from outside."""
    problems = []
    if found.modes != whole.modes:
        problems.append(f"computed in {', '.join(sorted(found.modes))} in place of {', '.join(sorted(whole.modes))}")
    if found.tokens != whole.tokens:
        problems.append(f"other tokens: {found.tokens} in place of {whole.tokens}")
    expected = frozenset({"tcp"}) if missing in NEEDED_BY_SHM else whole.transports
    if found.transports != expected:
        problems.append(f"KV over {', '.join(sorted(found.transports))} in place of {', '.join(sorted(expected))}")
    if missing == "parent_death" and found.num_processes <= whole.num_processes:
        problems.append(f"{found.num_processes} processes, none of which watches over another")
    return problems


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the meshes one after another; return 0 where all are as they have to be."""
    names = [each.name for each in CAPABILITIES]
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("missing", nargs="*", metavar="CAPABILITY", help=f"some of {', '.join(names)}")
    wanted = parser.parse_args(arguments).missing or names
    if unknown := sorted(set(wanted) - set(names)):
        parser.error(f"{', '.join(unknown)}: no capability; give some of {', '.join(names)}")
    absent = [each.name for each in capabilities.lacking()]
    print(f"this machine lacks {', '.join(absent)}" if absent else "this machine has all capabilities", flush=True)
    with_all = {is_portable: _whole(is_portable=is_portable) for is_portable in sorted({name in PORTABLE for name in wanted})}
    return 1 if sum([not _is_same(name, with_all[name in PORTABLE]) for name in wanted]) else 0


def _whole(*, is_portable: bool) -> Run:
    whole = run("", **({"PDMESH_CPU_ISA": "portable"} if is_portable else {}))
    about = f"{', '.join(sorted(whole.modes))}, KV over {', '.join(sorted(whole.transports))}, {whole.num_processes} processes"
    print(f"with all of them: {about}", flush=True)
    return whole


def _is_same(name: str, whole: Run) -> bool:
    began = time.monotonic()
    try:
        found = run(name)
        problems = differences(name, found, whole)
        about = f"KV over {', '.join(sorted(found.transports))}, {found.num_processes} processes"
    except Failed as error:
        problems, about = [str(error)], "no answer"
    verdict = "; ".join(problems) or "the same tokens"
    print(f"without {name}: {verdict} ({about}, {time.monotonic() - began:.0f} s)", flush=True)
    return not problems


if __name__ == "__main__":
    sys.exit(main())
