"""`make bench-clients`: others' clients and load generators complete, get the answers that pdmesh's own client gets, and see the
mesh's own timings.

One request at a time, streamed. TTFT and TPOT are to differ from what the mesh recorded of the same requests by at most 5 % or
2 ms, whichever is more: what lies between is the client, its protocol, its gateway and the loopback.

Beside the timing, the part `agents`: agents' libraries ask what their users ask (`agents/`), and each check is to be right.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.harness import (
    PLAIN_FLAGS,
    RESULTS,
    Figure,
    chosen,
    merged,
    parser_of,
    say,
    show,
    this_machine,
    write_document,
)
from pdmesh.launcher.mesh import LocalMesh
from pdmesh.launcher.plan import LocalMeshConfig
from pdmesh.models.registry import ensure_model
from tests.interop import asking, loading
from tests.interop.agents import running
from tests.interop.catalogue import CLIENTS, GENERATORS, REFERENCE
from tests.interop.records import Records, recording
from tests.interop.site import Site

ROUNDS = 3
PARTS = ("agents", "timing")


def measure(site: Site, records: Records) -> list[Figure]:
    """Clients in turn, round after round; then each load generator once."""
    runs: dict[str, list[asking.Run]] = {client.name: [] for client in CLIENTS}
    for number in range(ROUNDS):
        for client in CLIENTS:
            run = asking.run(client, site, records)
            runs[client.name].append(run)
            say(f"round {number + 1}/{ROUNDS}  {client.name}: {run.problem or f'{len(run.outcomes)} requests'}")
    expected = [outcome.text for outcome in runs[REFERENCE.name][0].outcomes]
    figures = [figure for client in CLIENTS for figure in asking.figures_of(client.name, runs[client.name], expected)]
    for generator in GENERATORS:
        load = loading.run(generator, site, records)
        say(f"{generator.name}: {load.problem or load.report}")
        figures += loading.figures_of(generator, load)
    return figures


async def main(parts: Sequence[str]) -> None:
    """Measures these parts; the other's figures in the file stay as they are."""
    folder = ensure_model("smollm2-135m-instruct", say)
    with tempfile.TemporaryDirectory(prefix="bench-clients-") as temporary:
        path = Path(temporary) / "records.jsonl"
        config = LocalMeshConfig(
            model=str(folder),
            port=0,
            http_port=0,
            worker_args=("--kv-memory-mb", "512", *PLAIN_FLAGS),
            router_args=("--http-keep-responses-s", "600"),  # the default of npm's `ai` refers to what was said before
            adjust=partial(recording, records=path),
        )
        async with LocalMesh(config, on_event=say) as mesh:
            site = Site(mesh.router_address, mesh.http_urls[0], config.name_of_model, folder.resolve())
            if "agents" in parts:
                tried = await asyncio.to_thread(running.run_all, site)
                save("agents", running.figures_of(tried), agents=[row for one in tried for row in one.as_rows()])
            if "timing" in parts:
                figures = await asyncio.to_thread(measure, site, Records(path))
                save("timing", figures, machine=asdict(this_machine()), model=config.name_of_model, load=_load())


def _load() -> str:
    numbers = f"{len(asking.CASES)} of a client in each round, {len(loading.PROMPTS)} of a load generator"
    return f"chats, one at a time, {asking.MAX_TOKENS} tokens each: {numbers}"


def save(part: str, figures: Sequence[Figure], **about: Any) -> None:
    """Writes a part's figures and what else it says; the machine in the file is that of the timing."""
    path = RESULTS / "clients.json"
    known = json.loads(path.read_text()) if path.exists() else {"machine": asdict(this_machine())}
    known.setdefault("parts", {"timing": len(known["figures"])} if "figures" in known else {})
    show(figures)
    write_document(path, {**merged({**known, "command": "make bench-clients"}, part, figures), **about})


if __name__ == "__main__":
    parser = parser_of("tests.interop", __doc__)
    parser.add_argument("--only", default="", help=f"of {','.join(PARTS)}")
    try:
        names = chosen(parser.parse_args().only, PARTS)
    except ValueError as error:
        parser.error(str(error))
    asyncio.run(main(names))
