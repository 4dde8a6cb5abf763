"""`pdmesh demo`: a whole mesh for one question, and where the time of its answer went."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from rich.text import Text

from pdmesh.client.client import AsyncClient
from pdmesh.client.types import Completed, Delta, Event, Generation, Message
from pdmesh.client.wire import generation
from pdmesh.commands.timings import timings_report
from pdmesh.launcher.mesh import LocalMesh, process_table
from pdmesh.launcher.plan import START_TIMEOUT_HELP, LocalMeshConfig, check_packages, engine_python
from pdmesh.models import registry
from pdmesh.runtime.child import StartFailed
from pdmesh.terminal import console, show
from pdmesh.worker.engines.registry import DEFAULT_ENGINE, ENGINE_HELP, ENGINES, start_timeout_s

_ANSWER_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Options:
    """Start a mesh, ask a question through it, show where the time went, stop: pdmesh demo."""

    question: str = field(
        default="What is the capital of France?", metadata={"help": "what to ask, also as bare words", "positional": True}
    )
    follow_up: str = field(default="And what is it famous for?", metadata={"help": "second turn; empty: none"})
    max_tokens: int = field(default=48, metadata={"help": "most tokens of an answer"})
    model: str = field(default=registry.DEFAULT_MODEL, metadata={"help": "known name, Hugging Face folder or .gguf file"})
    engine: str = field(default=DEFAULT_ENGINE, metadata={"help": ENGINE_HELP, "choices": ENGINES})
    device: Literal["cpu", "cuda"] = field(default="cpu", metadata={"help": "where the engines compute"})
    threads: int = field(default=0, metadata={"help": "threads of each worker; 0: the cores divided by the workers"})
    start_timeout_s: float = field(default=0.0, metadata={"help": START_TIMEOUT_HELP})


def run(options: Options) -> int:
    """Run the command; return 0 when everything was answered and all processes have ended."""
    try:
        check_packages()
        python = engine_python(options.engine, options.device)
        folder = registry.ensure_model(options.model)
        return asyncio.run(_demo(options, folder, python))
    except (registry.ModelError, StartFailed) as error:
        print(f"pdmesh demo: {error}", file=sys.stderr)
        return 1


async def _demo(options: Options, folder: Path, python: str) -> int:
    began = time.monotonic()
    config = LocalMeshConfig(
        model=str(folder),
        model_name=registry.model_name(options.model),
        engine=options.engine,
        worker_python=python,
        device=options.device,
        port=0,
        num_threads=options.threads,
        throwaway_secret=True,
        start_timeout_s=options.start_timeout_s or start_timeout_s(options.engine),
    )
    mesh = LocalMesh(config, on_event=_note, on_progress=_note)
    _note(f"starting Redis, a router, a prefill worker and a decode worker; logs in {mesh.log_dir}")
    async with mesh:
        pids = mesh.pids
        _note(f"ready after {time.monotonic() - began:.1f} s")
        show(process_table(mesh))
        async with AsyncClient(mesh.router_addresses) as client:
            await _talk(client, options)
    code = _check_ended(pids, time.monotonic() - began)
    if code == 0:  # logs of a success are not needed
        shutil.rmtree(mesh.log_dir, ignore_errors=True)
    return code


async def _talk(client: AsyncClient, options: Options) -> None:
    history: list[Message] = []
    for question in filter(None, (options.question, options.follow_up)):
        history.append(Message("user", question))
        answer = await _ask(client, history, options.max_tokens)
        history.append(Message("assistant", answer.text))
        completed = Completed(answer.usage, answer.timings, answer.num_resumes)
        show("", *timings_report(completed))


async def _ask(client: AsyncClient, history: list[Message], max_tokens: int) -> Generation:
    """Stream one answer to the terminal. Greedy: the same every time; REMOTE: there is a hand-off to see."""
    head = Text.assemble(("\nyou", "bold"), f"    {history[-1].content}\n", ("model", "bold"), "  ")
    console(sys.stdout).print(head, end="")
    events: list[Event] = []
    stream = client.chat_stream(history, temperature=0.0, max_tokens=max_tokens, mode="remote", timeout=_ANSWER_TIMEOUT_S)
    async with stream:
        async for event in stream:
            events.append(event)
            if isinstance(event, Delta):
                print(event.text, end="", flush=True)
    print(flush=True)
    return generation(events)


def _check_ended(pids: dict[str, int], elapsed_s: float) -> int:
    left = [f"{name} (pid {pid})" for name, pid in pids.items() if _exists(pid)]
    if left:
        _note(f"still running: {', '.join(left)}")
        return 1
    _note(f"all {len(pids)} processes have ended; {elapsed_s:.1f} s in total")
    return 0


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # the id belongs to another user's process now
        return False
    return True


def _note(text: str) -> None:
    show(Text(f"· {text}", "faint"), stream=sys.stderr)
