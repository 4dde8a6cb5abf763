"""`make test-clients`: builds the clients of each language from the proto files, and runs them against one real mesh.

Each example has to print the text that the Python client gets for the same request. The TypeScript package's own tests run too,
those against the mesh included, which kill a router under streams. A language whose toolchain is missing is left out, by name.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from pdmesh.client import AsyncClient
from pdmesh.launcher.mesh import LocalMesh
from pdmesh.launcher.plan import LocalMeshConfig
from pdmesh.runtime.rpc.certificates import make_certificates
from tests.clients.control import controlled, ready
from tests.clients.languages import LANGUAGES, Command, Language, Question
from tests.mesh.checks import Footprint, assert_whole
from tests.support.tiny_models import make_tiny_model

TIMEOUT_S = 300
# The text has characters of several bytes: programs are to print UTF-8.
PROMPT, SEED, MAX_TOKENS = "Once upon a time: ü", 2**63 + 7, 40


class Failed(Exception):
    """Raised when a command of a language fails; holds what it printed."""


def say(line: str) -> None:
    print(line, flush=True)


async def run(command: Command, language: Language, env: Mapping[str, str]) -> bytes:
    """Return what a command prints. Raises Failed. No process of it is left."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        *command, cwd=language.folder, env={**os.environ, **language.env, **env}, stdout=pipe, stderr=pipe, start_new_session=True
    )
    try:
        out, err = await asyncio.wait_for(process.communicate(), TIMEOUT_S)
    except TimeoutError:
        raise Failed(f"{' '.join(command)[:200]}: not within {TIMEOUT_S} s") from None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    if process.returncode != 0:
        raise Failed(f"{' '.join(command)[:200]}: exit status {process.returncode}\n{out.decode()}{err.decode()}")
    return out


async def built(language: Language) -> bool:
    """Build the client of a language; return False, and say why, if its toolchain is missing."""
    missing = language.missing
    if missing:
        packages = " ".join(dict.fromkeys(missing.values()))
        say(f"LEFT OUT  {language.name}: missing {', '.join(missing)}; with Debian: apt-get install {packages}")
        return False
    too_old = language.too_old()
    if too_old:
        say(f"LEFT OUT  {language.name}: too old: {too_old}")
        return False
    for command in language.build():
        await run(command, language, {})
    say(f"built     {language.name}")
    return True


@asynccontextmanager
async def running_mesh(folder: Path) -> AsyncIterator[LocalMesh]:
    """A mesh of two routers and three workers with a tiny model. At the end every pool is whole and nothing is left behind."""
    model = make_tiny_model(folder / "tiny")
    config = LocalMeshConfig(model=str(model), num_decode=2, num_routers=2, port=0, num_threads=1)
    async with LocalMesh(config) as mesh:
        footprint = Footprint.of(mesh)
        yield mesh
        await assert_whole(mesh, timeout_s=30)
        footprint.grow(mesh)
    footprint.assert_gone()


async def check(language: Language, mesh: LocalMesh, control: str, folder: Path) -> None:
    """Raise Failed unless the example prints what the Python client gets, and the tests pass."""
    async with AsyncClient(mesh.router_addresses) as client:
        expected = (await client.generate(PROMPT, seed=SEED, max_tokens=MAX_TOKENS, timeout=60)).text
    shown = await run(language.example(Question(mesh.router_address, PROMPT, SEED, MAX_TOKENS)), language, {})
    if shown != expected.encode():
        raise Failed(f"it printed {shown!r}, and the Python client {expected.encode()!r}")
    say(f"passed    {language.name}: the example prints the text that the Python client gets")
    if language.tests:
        make_certificates(folder / "certificates")
        env = {
            "PDMESH_ROUTERS": ",".join(mesh.router_addresses),
            "PDMESH_CONTROL": control,
            "PDMESH_CERTIFICATES": str(folder / "certificates"),
        }
        report = await run(language.tests, language, env)
        counts = [line.strip("# ℹ") for line in report.decode().splitlines() if line.startswith(("# ", "ℹ "))]
        say(f"passed    {language.name}: {', '.join(line for line in counts if line.startswith(('pass', 'fail', 'skipped')))}")


async def checked(languages: Sequence[Language]) -> int:
    """Return the number of languages that fail against the mesh."""
    failures = 0
    with tempfile.TemporaryDirectory(prefix="test-clients-") as temporary:
        async with running_mesh(Path(temporary)) as mesh, controlled(mesh) as control:
            for language in languages:
                await ready(mesh)
                try:
                    await check(language, mesh, control, Path(temporary))
                except Failed as failed:
                    failures += 1
                    say(f"FAILED    {language.name}: {failed}")
    return failures


async def main(names: Sequence[str]) -> int:
    """Return the exit status."""
    failures, complete = 0, list[Language]()
    for language in (each for each in LANGUAGES if not names or each.name.lower() in names):
        try:
            complete += [language] if await built(language) else []
        except Failed as failed:
            failures += 1
            say(f"FAILED    {language.name}: {failed}")
    if complete:
        failures += await checked(complete)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main([name.lower() for name in sys.argv[1:]])))
