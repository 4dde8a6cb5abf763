"""The forced calls of `make bench-constrained`: tools that can be forced, requests alike but for the constraint, and what is
compared with what."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import jsonschema
import openai
import pytest

from benchmarks.forced_calls import GOAL, NUM_TOOLS, TOOLS, Asker, Pass, Said, Samples, Way, figures, request, why_wrong
from pdmesh.text.grammar import GrammarCompiler
from pdmesh.text.tokenizer import Tokenizer
from tests.support.tiny_models import IM_END, VOCAB_SIZE, write_byte_tokenizer


def test_tools(tmp_path: Path) -> None:
    write_byte_tokenizer(tmp_path)
    compiler = GrammarCompiler(Tokenizer.load(tmp_path).to_json(), VOCAB_SIZE, {IM_END})
    assert len(TOOLS) == NUM_TOOLS
    for schema in TOOLS.values():
        jsonschema.Draft202012Validator.check_schema(schema)
        compiler.compile("json_schema", json.dumps(schema))


def test_why_an_answer_is_wrong() -> None:
    name, arguments = next((name, {"id": "a"}) for name, schema in TOOLS.items() if schema["required"] == ["id"])
    right = Said(((name, json.dumps(arguments)),), "", "tool_calls", 9, 20)
    assert why_wrong(7, right) is None
    assert "7: " in str(why_wrong(7, Said((), "", "tool_calls", 9, 20)))
    assert name in str(why_wrong(7, Said(((name, "{}"),), "", "tool_calls", 9, 20)))
    assert "no_tool" in str(why_wrong(7, Said((("no_tool", "{}"),), "", "tool_calls", 9, 20)))


class _Recorder:
    """Stands for OpenAI's client: keeps what it is asked, and answers with no call."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.chat = SimpleNamespace(completions=SimpleNamespace(create=self.create))

    async def create(self, **asked: Any) -> Any:
        self.asked.append(asked)
        choice = SimpleNamespace(message=SimpleNamespace(tool_calls=None, content="text"), finish_reason="length")
        return SimpleNamespace(choices=[choice], usage=SimpleNamespace(completion_tokens=asked["max_tokens"], prompt_tokens=20))


def test_the_ways_differ_in_the_constraint_and_in_nothing_else() -> None:
    recorder = _Recorder()
    asker = Asker(cast(openai.AsyncOpenAI, recorder), "m", {})

    async def ask() -> None:
        await asker.forced(3)
        for way in (Way.WITH_TOOLS, Way.WITHOUT_TOOLS):
            assert (await asker.free(way, 3, 17)).num_tokens == 17

    asyncio.run(ask())
    forced, with_tools, without_tools = recorder.asked
    shown = ("messages", "tools", "temperature", "seed", "parallel_tool_calls")
    assert [forced[name] for name in shown] == [with_tools[name] for name in shown] == [request(3)[name] for name in shown]
    assert (forced["tool_choice"], with_tools["tool_choice"]) == ("required", "auto")
    assert without_tools.keys() & {"tools", "tool_choice", "parallel_tool_calls"} == set()
    assert without_tools["messages"] == forced["messages"]
    assert [asked["extra_body"].get("ignore_eos", False) for asked in recorder.asked] == [False, True, True]
    assert len({asked["extra_body"]["cache_salt"] for asked in recorder.asked}) == 3


def _pass(num_tokens: int, took_s: float, cpu_s: float) -> Pass:
    said = Said((), "", "", num_tokens, 20)
    return Pass([said, said], took_s, {"router-0": cpu_s, "decode-0": 2 * cpu_s, "decode-1": cpu_s})


def test_figures() -> None:
    samples = Samples()
    for took_s in (1.0, 2.0, 5.0):
        samples.passes[Way.FORCED].append(_pass(50, took_s, 0.2))
        samples.passes[Way.WITH_TOOLS].append(_pass(50, took_s / 2, 0.4))
        samples.passes[Way.WITHOUT_TOOLS].append(_pass(50, took_s * 4, 0.1))
    samples.wrong, samples.differing = ["1: no call"], [4, 5]
    made = {figure.name: figure for figure in figures(samples)}
    assert made["forced calls: answers whose calls all parse and validate"].value == 5
    assert made["forced calls: answers that are the same streamed"].value == 4
    ratios = {name.partition("by that of ")[2]: figure for name, figure in made.items() if figure.unit == "ratio"}
    assert {name: (figure.value, figure.goal) for name, figure in ratios.items()} == {
        Way.WITH_TOOLS: (0.5, GOAL),
        Way.WITHOUT_TOOLS: (4.0, GOAL),
    }
    assert made[f"output, {Way.FORCED}"].value == 50
    assert made[f"{Way.FORCED}: tokens of a prompt"].value == 20
    assert made[f"{Way.FORCED}: processor time of a request, decode"].value == pytest.approx(300)
    assert made[f"{Way.WITH_TOOLS}: processor time of a request, router"].value == pytest.approx(200)
