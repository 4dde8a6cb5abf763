"""`pdmesh chat`: a conversation at the terminal, or one question and its answer."""

from __future__ import annotations

import importlib
import secrets
import sys
from contextlib import suppress
from dataclasses import dataclass, field

from pdmesh.cli import explain
from pdmesh.client.client import Client
from pdmesh.client.types import GenerateOptions, Generation, Message
from pdmesh.commands.options import Connection, Constraint, Routing, Sampling, flat
from pdmesh.commands.streaming import show_json, show_text
from pdmesh.errors import MeshError

SESSION_RETENTION_S = 600
"""Someone who reads an answer and thinks finds the conversation cached for so long."""
RELEASE_TIMEOUT_S = 3.0
_HELP = "/exit ends, /new starts over, Ctrl-C stops an answer"


@dataclass(frozen=True)
class Options:
    """Talk to the model. With a message, pdmesh chat "What is the capital of France?", one answer; without, a conversation."""

    message: str = field(
        default="", metadata={"help": "one question, also as bare words; empty: a conversation", "positional": True}
    )
    system: str = field(default="", metadata={"help": "instructions to the model about its task"})
    json: bool = field(default=False, metadata={"help": "write events as JSON lines"})
    timings: bool = field(default=False, metadata={"help": "show where the time went"})
    sampling: Sampling = field(default_factory=Sampling, metadata=flat())
    constraint: Constraint = field(default_factory=Constraint, metadata=flat())
    routing: Routing = field(default_factory=Routing, metadata=flat())
    connection: Connection = field(default_factory=Connection, metadata=flat())


def run(options: Options) -> int:
    """Run the command; return 0 when the answer, or the conversation, is complete."""
    if options.timings:
        importlib.import_module("pdmesh.commands.timings")  # needs rich, and fails before the question is asked
    history = [Message("system", options.system)] if options.system else []
    with options.connection.client() as client:
        if options.message:
            _answer(client, options, [*history, Message("user", options.message)], {})
            return 0
        return _converse(client, options, history)


def _converse(client: Client, options: Options, system: list[Message]) -> int:
    if sys.stdin.isatty():
        names = ", ".join(model.name for model in client.list_models(timeout=options.connection.timeout))
        print(f"{names} · {_HELP}", file=sys.stderr)
    while _one_conversation(client, options, system):
        pass
    return 0


def _one_conversation(client: Client, options: Options, system: list[Message]) -> bool:
    """Hold one conversation, which is a session: its KV is kept between turns. Return whether another one is wanted."""
    history, session_id, was_asked = list(system), f"chat-{secrets.token_hex(12)}", False
    session = GenerateOptions(session_id=session_id, kv_retention_s=SESSION_RETENTION_S)
    try:
        while (line := _read_line()) is not None and line not in ("/exit", "/quit"):
            if line == "/new":
                return True
            if line.startswith("/"):
                print(f"{line}: unknown; {_HELP}", file=sys.stderr)
            elif line:
                was_asked = True  # also of an answer that is stopped workers retain what they have computed
                history = _turn(client, options, history, line, session)
        return False
    finally:
        if was_asked:
            with suppress(MeshError):  # what is not released ends with its time
                client.release_session(session_id, tenant=options.routing.tenant, timeout=RELEASE_TIMEOUT_S)


def _read_line() -> str | None:
    """Return the next line; None at the end of the input, or at Ctrl-C on an empty prompt."""
    try:
        return input("> " if sys.stdin.isatty() else "").strip()
    except (EOFError, KeyboardInterrupt):
        print(file=sys.stderr)
        return None


def _turn(client: Client, options: Options, history: list[Message], line: str, session: GenerateOptions) -> list[Message]:
    """Return the history after one exchange; unchanged without a whole answer."""
    asked = [*history, Message("user", line)]
    try:
        return [*asked, Message("assistant", _answer(client, options, asked, session).text)]
    except KeyboardInterrupt:
        print("\n(stopped; the question is forgotten)", file=sys.stderr)
    except MeshError as error:
        print(f"\n{explain(error)}", file=sys.stderr)
    return history


def _answer(client: Client, options: Options, messages: list[Message], session: GenerateOptions) -> Generation:
    given = {**options.sampling.given(), **options.constraint.given(), **options.routing.given(), **session}
    events = client.chat_stream(
        messages,
        model=options.routing.model,
        timeout=options.connection.timeout,
        **given,  # type: ignore[arg-type]  # merged GenerateOptions
    )
    with events:
        answer = show_json(events) if options.json else show_text(events)
    if options.timings:
        from pdmesh.commands.timings import show_timings

        show_timings(answer)
    return answer
