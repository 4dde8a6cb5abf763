"""The program: overview, bare words, exit codes, and commands against a scripted router."""

from __future__ import annotations

import asyncio
import io
import json
import os
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from pdmesh import cli, errors
from pdmesh.cli import parse_options, with_flags
from pdmesh.client.types import Event, Generation
from pdmesh.commands import chat, generate, options
from pdmesh.runtime.child import import_path
from pdmesh.v1 import common_pb2
from tests.pdmesh.fake_mesh import NUM_TOKENS, Script, start_router, text

ANSWER = "".join(text(0, index) for index in range(NUM_TOKENS))


async def run(*argv: str) -> int:
    return await asyncio.to_thread(cli.run, argv)


@dataclass(frozen=True)
class Words:
    action: str = field(default="", metadata={"positional": True})
    rest: str = field(default="", metadata={"positional": True})
    number: int = 0
    loud: bool = False


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ([], Words()),
        (["go"], Words("go")),
        (["go", "on", "and", "on"], Words("go", "on and on")),
        (["--number", "3", "go", "--loud", "on"], Words("go", "on", 3, True)),
        (["--number=-3", "go"], Words("go", "", -3)),
        (["--number", "-3", "go"], Words("go", "", -3)),
        (["go", "--", "--loud", "-x"], Words("go", "--loud -x")),
        (["--action", "stay"], Words("stay")),
    ],
)
def test_bare_words(argv: list[str], expected: Words) -> None:
    assert parse_options(Words, argv, {}, prog="test") == expected


@dataclass(frozen=True)
class Files:
    first: str = field(default="", metadata={"positional": True})
    more: tuple[str, ...] = field(default=(), metadata={"positional": True})


def test_bare_words_of_a_tuple_stay_apart() -> None:
    assert parse_options(Files, ["a", "b c", "d"], {}, prog="test") == Files("a", ("b c", "d"))
    assert parse_options(Files, ["a"], {}, prog="test") == Files("a")


def test_bare_words_keep_unknown_flags_for_the_loader_to_refuse(capsys: pytest.CaptureFixture[str]) -> None:
    assert with_flags(Words, ["--lout", "go"]) == ["--lout", "--action=go"]
    with pytest.raises(SystemExit) as caught:
        parse_options(Words, ["--lout"], {}, prog="test")
    assert caught.value.code == 2
    assert "--loud" in capsys.readouterr().err


def test_overview_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(f"  {name} " in shown for name in cli.COMMANDS)
    assert cli.run([]) == 2


def test_python_m_imports_nothing_from_the_current_folder(tmp_path: Path) -> None:
    for name in ("difflib", "router", "rich"):
        (tmp_path / f"{name}.py").write_text(f'raise SystemExit("their {name} was imported")\n')
    command, env = [sys.executable, "-m", "pdmesh", "--help"], {**os.environ, **import_path()}
    shown = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert (shown.returncode, shown.stderr) == (0, "") and "usage: pdmesh" in shown.stdout


def test_unknown_command_suggests_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["stats"]) == 2
    assert "did you mean status?" in capsys.readouterr().err


@pytest.mark.parametrize("name", sorted(cli.COMMANDS))
def test_every_command_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.run([name, "--help"])
    assert caught.value.code == 0
    assert f"usage: pdmesh {name}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.InvalidArgument("seed", "bad"), 2),
        (errors.NotFound("no such model"), 2),
        (errors.Unavailable("gone"), 3),
        (errors.Overloaded("full", retry_delay_s=1.0), 3),
        (errors.DeadlineExceeded("late"), 4),
        (errors.Internal("bug"), 1),
    ],
)
def test_exit_codes(error: errors.MeshError, code: int) -> None:
    assert cli.exit_code(error) == code
    assert error.message in cli.explain(error)


async def test_generate_streams_text(capsys: pytest.CaptureFixture[str]) -> None:
    router = await start_router()
    assert await run("generate", "Once", "upon", "a", "time", "--router", router.address, "--temperature", "0", "--timings") == 0
    shown = capsys.readouterr()
    assert shown.out == ANSWER + "\n"
    assert "time to first token" in shown.err
    sent = router.script.requests[0]
    assert sent.text == "Once upon a time"  # type: ignore[union-attr]
    assert sent.sampling.HasField("temperature") and sent.sampling.temperature == 0.0
    assert not sent.sampling.HasField("top_p") and not sent.sampling.HasField("max_tokens")
    await router.stop()


async def test_generate_writes_json_lines(capsys: pytest.CaptureFixture[str]) -> None:
    router = await start_router()
    assert await run("generate", "hi", "--json", "--n", "2", "--mode", "local", "--router", router.address) == 0
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [event["event"] for event in events] == ["started", *["delta"] * (2 * NUM_TOKENS), "completed"]
    assert events[-1]["timings"]["mode"] == "remote"
    await router.stop()


async def test_generate_reads_standard_input(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    router = await start_router()
    monkeypatch.setattr("sys.stdin", io.StringIO("from a pipe"))
    assert await run("generate", "--router", router.address) == 0
    assert router.script.requests[0].text == "from a pipe"  # type: ignore[union-attr]
    await router.stop()


async def test_refused_request_exits_with_its_reason(capsys: pytest.CaptureFixture[str]) -> None:
    router = await start_router(Script(failure=errors.InvalidArgument("sampling.top_p", "sampling.top_p is 2; give at most 1")))
    assert await run("generate", "hi", "--top-p", "2", "--router", router.address) == 2
    assert "top_p is 2" in capsys.readouterr().err
    await router.stop()


async def test_an_answer_that_breaks_off_ends_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    router = await start_router(Script(fail_after=2, failure=errors.Internal("broken")))
    assert await run("generate", "hi", "--router", router.address) == 1
    shown = capsys.readouterr()
    assert shown.out == f"{text(0, 0)}{text(0, 1)}\n" and "broken" in shown.err
    await router.stop()


async def test_no_mesh_exits_with_a_hint(capsys: pytest.CaptureFixture[str]) -> None:
    assert await run("status", "--router", "127.0.0.1:1", "--resume-timeout-s", "0.1") == 3
    assert "pdmesh up" in capsys.readouterr().err


async def test_chat_keeps_its_history(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    router = await start_router()
    monkeypatch.setattr("sys.stdin", io.StringIO("first\n/nonsense\nsecond\n/new\nthird\n/exit\nnever\n"))
    assert await run("chat", "--system", "be brief", "--router", router.address) == 0
    turns = [[message.content for message in request.messages] for request in router.script.requests]  # type: ignore[union-attr]
    assert turns == [["be brief", "first"], ["be brief", "first", ANSWER, "second"], ["be brief", "third"]]
    assert "/nonsense: unknown" in capsys.readouterr().err
    sessions = [request.options.session_id for request in router.script.requests]
    assert sessions[0] == sessions[1] != sessions[2] and all(sessions)
    assert {request.options.kv_retention_s for request in router.script.requests} == {600}
    assert [released.session_id for released in router.script.released] == [sessions[0], sessions[2]]
    await router.stop()


async def test_chat_ends_also_where_nothing_can_be_released(monkeypatch: pytest.MonkeyPatch) -> None:
    router = await start_router()
    monkeypatch.setattr("sys.stdin", io.StringIO("/exit\n"))
    assert await run("chat", "--router", router.address) == 0
    assert not router.script.released  # nothing was said, so nothing is retained
    router.script.release_failure = errors.InvalidArgument("session_id", "not here")
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n"))
    assert await run("chat", "--tenant", "t", "--router", router.address) == 0
    assert [released.tenant for released in router.script.released] == ["t"]
    await router.stop()


async def test_chat_releases_a_session_without_a_whole_answer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    router = await start_router()

    def stopped(events: Iterable[Event]) -> Generation:
        next(iter(events))
        raise KeyboardInterrupt

    monkeypatch.setattr(chat, "show_text", stopped)
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n/new\n/exit\n"))
    assert await run("chat", "--router", router.address) == 0
    assert "stopped" in capsys.readouterr().err
    (asked,) = [request.options.session_id for request in router.script.requests]
    assert [released.session_id for released in router.script.released] == [asked]
    await router.stop()


async def test_chat_answers_one_question(capsys: pytest.CaptureFixture[str]) -> None:
    router = await start_router()
    assert await run("chat", "What", "now?", "--router", router.address) == 0
    assert capsys.readouterr().out == ANSWER + "\n"
    await router.stop()


async def test_status_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    router = await start_router()
    assert await run("status", "--json", "--router", router.address) == 0
    assert json.loads(capsys.readouterr().out)["router_id"] == "fake-router"
    await router.stop()


async def test_models_lists_known_and_served(capsys: pytest.CaptureFixture[str]) -> None:
    router = await start_router()
    assert await run("models", "list", "--json", "--router", router.address) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["served"][0]["name"] == "fake" and shown["known"][0]["licence"]
    await router.stop()


async def test_generate_sends_its_constraint(tmp_path: Path) -> None:
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "object"}')
    router = await start_router()
    for flags in (["--json-schema", str(schema)], ["--regex", "a+"], ["--choice", "yes,no"], ["--grammar", str(schema)]):
        assert await run("generate", "hi", "--router", router.address, *flags) == 0
    sent = [request.sampling.constraint for request in router.script.requests]
    assert sent == [
        common_pb2.Constraint(json_schema='{"type": "object"}'),
        common_pb2.Constraint(regex="a+"),
        common_pb2.Constraint(choice=common_pb2.Alternatives(values=["yes", "no"])),
        common_pb2.Constraint(grammar='{"type": "object"}'),
    ]
    await router.stop()


def test_options_check_themselves() -> None:
    with pytest.raises(ValueError, match="grammar: excludes regex"):
        options.Constraint(regex="a", grammar="b").validate()
    with pytest.raises(ValueError, match="json_schema: /nowhere"):
        options.Constraint(json_schema="/nowhere").validate()
    with pytest.raises(ValueError, match="token_ids"):
        generate.Options(prompt="a", token_ids=(1,)).validate()
    assert chat.Options().message == ""
