"""Every format: what models write in it comes out as the calls that were meant, in every cut, and no text is lost."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from pdmesh.text.parsers.events import Message
from pdmesh.text.parsers.registry import NONE, REASONING_FORMATS, TOOL_FORMATS, make_parser
from tests.text.parsers.writers import WRITERS, Writer, Written

TEXT: dict[str, Any] = {"type": "object", "properties": {"text": {"type": "string"}}}
SCHEMAS: dict[str, dict[str, Any]] = {
    "weather": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    "note": TEXT,
    "plan": {
        "type": "object",
        "properties": {
            "steps": {"type": "array"},
            "deep": {"type": "object"},
            "share": {"type": "number"},
            "on": {"type": "boolean"},
        },
    },
    "stop": {"type": "object", "properties": {}},
}
WEATHER: tuple[str, dict[str, Any]] = ("weather", {"city": "Lyon", "days": 3})
PLAN: tuple[str, dict[str, Any]] = (
    "plan",
    {"steps": [1, 2.5, ["a", {"b": []}]], "deep": {"x": {"y": "z"}}, "share": -0.25, "on": True},
)
CASES: dict[str, Written] = {
    "one call": (WEATHER,),
    "nested values": (PLAN,),
    "no arguments": (("stop", {}),),
    "two calls": (WEATHER, ("weather", {"city": "Köln", "days": 1})),
    "three tools": (WEATHER, ("stop", {}), PLAN),
    "the same call twice": (WEATHER, WEATHER),
    "other scripts": (("note", {"text": "東京 — Ünïcödé 🙂 नमस्ते"}),),
    "quotes and breaks": (("note", {"text": "a \"b\"\n\tc\\d 'e'"}),),
    "marks in a text": (("note", {"text": "<b>x</b> {y: [z]} <tool_call ] ) ; , = |>"}),),
    "code in a text": (("note", {"text": "def f(a):\n    return a[0] # {1: 2}\n"}),),
    "an empty text": (("note", {"text": ""}),),
    "a long text": (("note", {"text": "words and words, " * 60}),),
}
TEXTS = ["Paris.", "a < b, and [1] {x} `code`", "  indented\n\n", "1", "Ends with <", "", "{", "[", "functool", "<|", "café 東"]
ALL = [(name, writer) for name, writers in WRITERS.items() for writer in writers]
IDS = [f"{name}-{number}" for name, writers in WRITERS.items() for number, _ in enumerate(writers)]


def message(name: str, pieces: Sequence[str], reasoning: str = NONE, *, has_begun: bool = False) -> Message:
    parser, found = make_parser(name, reasoning, SCHEMAS, has_begun=has_begun), Message()
    for piece in pieces:
        for event in parser.feed(piece):
            found.add(event)
    for event in parser.finish():
        found.add(event)
    return found


def said(found: Message) -> list[tuple[str, Any]]:
    return [(call.name, json.loads(call.arguments)) for call in found.calls]


def cuts(text: str) -> Iterator[list[str]]:
    """The text by characters, in two at every place (in a long one, at some), and in random pieces."""
    yield list(text)
    places = range(len(text)) if len(text) < 250 else random.Random(1).sample(range(len(text)), 60)
    for place in places:
        yield [text[:place], text[place:]]
    rng = random.Random(len(text))
    for _ in range(20):
        ends = sorted(rng.sample(range(1, len(text)), min(len(text) - 1, rng.randint(1, 12))))
        yield [text[begin:end] for begin, end in zip([0, *ends], [*ends, len(text)], strict=True)]


@pytest.mark.parametrize(("name", "writer"), ALL, ids=IDS)
@pytest.mark.parametrize("case", CASES)
def test_calls_are_those_that_were_meant_in_every_cut(name: str, writer: Writer, case: str) -> None:
    text = writer.calls(CASES[case])
    whole = message(name, [text])
    assert said(whole) == [(tool, dict(arguments)) for tool, arguments in CASES[case]]
    assert whole.content.strip() == "" and whole.warnings == [] and all(call.is_whole for call in whole.calls)
    for pieces in cuts(text):
        assert message(name, pieces) == whole


@pytest.mark.parametrize("name", TOOL_FORMATS)
@pytest.mark.parametrize("text", TEXTS)
def test_text_without_calls_is_content_as_it_stands(name: str, text: str) -> None:
    whole = message(name, [text])
    assert whole.content == text and whole.calls == [] and whole.thoughts == ""
    for pieces in cuts(text) if len(text) > 1 else ():
        assert message(name, pieces) == whole


@pytest.mark.parametrize(("name", "writer"), [each for each in ALL if each[1].can_follow_text])
def test_text_before_calls_is_content(name: str, writer: Writer) -> None:
    text = "I will look.\n\n" + writer.calls(CASES["two calls"])
    whole = message(name, [text])
    assert whole.content == "I will look." and said(whole) == said(message(name, [writer.calls(CASES["two calls"])]))
    for pieces in cuts(text):
        assert message(name, pieces) == whole


@pytest.mark.parametrize(("name", "writer"), ALL, ids=IDS)
def test_an_answer_that_was_cut_off_keeps_what_came(name: str, writer: Writer) -> None:
    whole = writer.calls((PLAN, WEATHER))
    for place in range(1, len(whole)):
        text = whole[:place]
        found = message(name, [text])
        assert message(name, list(text)) == found
        for call in found.calls:
            if call.is_whole:
                json.loads(call.arguments)
        assert len(found.calls) <= 2
        kept = found.content + found.thoughts + "".join(call.name + call.arguments for call in found.calls)
        assert {"z"} <= set(kept) or place <= whole.index("z")  # nothing that came by then is gone


@pytest.mark.parametrize(("name", "writer"), [each for each in ALL if each[1].opening])
def test_prose_behind_a_mark_is_content_with_a_warning(name: str, writer: Writer) -> None:
    text = f"See: {writer.opening}well, no. That is all."
    found = message(name, [text])
    assert found.calls == [] or not found.calls[0].is_whole
    assert found.warnings or not found.calls
    assert "That is all." in found.content + "".join(call.arguments for call in found.calls)
    for pieces in cuts(text):
        assert message(name, pieces) == found


@pytest.mark.parametrize("reasoning", REASONING_FORMATS)
@pytest.mark.parametrize("name", ["hermes", "llama", "none"])
@pytest.mark.parametrize("has_begun", [False, True])
def test_thoughts_stand_before_content_and_calls(reasoning: str, name: str, has_begun: bool) -> None:
    marks = REASONING_FORMATS[reasoning]
    thought = "Two and two…\nis <b>four</b>."
    text = ("" if has_begun else f"{marks.open}\n") + f"{thought}\n{marks.close}\n\nIt is 4."
    if name == "hermes":
        text += "\n" + WRITERS["hermes"][0].calls(CASES["one call"])
    found = message(name, [text], reasoning, has_begun=has_begun)
    assert (found.thoughts, found.content) == (thought, "It is 4.")
    assert said(found) == ([("weather", WEATHER[1])] if name == "hermes" else [])
    for pieces in cuts(text):
        assert message(name, pieces, reasoning, has_begun=has_begun) == found


@pytest.mark.parametrize(("name", "reasoning"), [("kimi", "think"), ("deepseek", "deepseek_r1"), ("mistral", "mistral")])
@pytest.mark.parametrize("has_begun", [False, True])
def test_a_call_ends_thoughts_that_the_model_does_not_end(name: str, reasoning: str, has_begun: bool) -> None:
    for writer in WRITERS[name]:
        text = ("" if has_begun else REASONING_FORMATS[reasoning].open) + f"I call it. {writer.calls(CASES['two calls'])}"
        found = message(name, [text], reasoning, has_begun=has_begun)
        assert (found.thoughts, found.content.strip(), found.warnings) == ("I call it.", "", [])
        assert said(found) == said(message(name, [writer.calls(CASES["two calls"])]))
        for pieces in cuts(text):
            assert message(name, pieces, reasoning, has_begun=has_begun) == found


def test_thoughts_without_an_end_are_thoughts() -> None:
    assert message("hermes", ["<think>on and on"], "think").thoughts == "on and on"
    assert message("hermes", ["on and on"], "think", has_begun=True).thoughts == "on and on"


def test_an_answer_without_thoughts_is_content() -> None:
    assert message("hermes", [" \n Paris."], "think") == Message(content=" \n Paris.")


def test_harmony_has_channels() -> None:
    text = (
        "<|channel|>analysis<|message|>Think. <|end|><|start|>assistant<|channel|>commentary<|message|>I look it up. <|end|>"
        "<|start|>assistant to=functions.weather<|channel|>commentary <|constrain|>json<|message|>"
        '{"city": "Lyon"}<|call|>'
    )
    found = message("harmony", [text])
    assert (found.thoughts, found.content, said(found)) == ("Think. ", "I look it up. ", [("weather", {"city": "Lyon"})])
    for pieces in cuts(text):
        assert message("harmony", pieces) == found
    final = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Paris.<|return|>"
    assert message("harmony", [final]) == Message(content="Paris.", thoughts="Hm.")


SHAPES: list[tuple[str, str, Written]] = [
    ("hermes", '<tool_call>{"arguments": {"days": 1}, "name": "weather"}</tool_call>', [("weather", {"days": 1})]),
    ("hermes", '<tool_call>{"name": "weather", "arguments": "{\\"days\\": 1}"}</tool_call>', [("weather", {"days": 1})]),
    ("hermes", '<tool_call>{"name": "stop"}</tool_call>', [("stop", {})]),
    ("hermes", '<tool_call>{"name": "stop", "arguments": null}</tool_call>', [("stop", {})]),
    ("hermes", '<tool_call>\n[{"name": "stop", "arguments": {}}]', [("stop", {})]),
    ("hermes", '<tool_call>{"type": "function", "function": {"name": "stop", "arguments": {}}}</tool_call>', [("stop", {})]),
    ("hermes", '<tool_call>{"id": "c1", "name": "stop", "parameters": {}}</tool_call>', [("stop", {})]),
    ("mistral", '[TOOL_CALLS]weather{"days": 2}', [("weather", {"days": 2})]),
    ("mistral", '[TOOL_CALLS]weather[CALL_ID]abc123xyz[ARGS]{"days": 2}', [("weather", {"days": 2})]),
    ("llama", '{"name": "weather", "parameters": {"days": 2}}<|eom_id|>', [("weather", {"days": 2})]),
    (
        "pythonic",
        "[weather(city='Lyon', days=2), plan(on=true, deep=None)]",
        [("weather", WEATHER[1] | {"days": 2}), ("plan", {"on": True, "deep": None})],
    ),
    ("pythonic", '[note(text="""long "text" here""")]', [("note", {"text": 'long "text" here'})]),
    ("pythonic", "<|python_start|>[stop()]<|python_end|>", [("stop", {})]),
    ("qwen_coder", "<function=weather>\n<parameter=days>\n2\n</parameter>\n</function>", [("weather", {"days": 2})]),
    ("qwen_coder", "<tool_call><function=plan><parameter=on>True</parameter></function></tool_call>", [("plan", {"on": True})]),
    (
        "qwen_coder",
        "<tool_call><function=new><parameter=x>7</parameter><parameter=y>seven</parameter></function></tool_call>",
        [("new", {"x": 7, "y": "seven"})],
    ),
    ("glm", "<tool_call>weather<arg_key>days</arg_key><arg_value>2</arg_value></tool_call>", [("weather", {"days": 2})]),
    (
        "kimi",
        "<|tool_calls_section_begin|><|tool_call_begin|>weather<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
        [("weather", {})],
    ),
    ("gemma", "```tool_code\n[weather(days=2), stop()]\n```", [("weather", {"days": 2}), ("stop", {})]),
    (
        "gemma",
        "<start_function_call>call:note{<escape>text<escape>:<escape>x<escape>}<end_function_call>",
        [("note", {"text": "x"})],
    ),
    ("json", ' {"name": "weather", "arguments": {"days": 2}} ', [("weather", {"days": 2})]),
    ("phi", '<|tool_call|>{"name": "stop", "arguments": {}}<|/tool_call|>', [("stop", {})]),
]


@pytest.mark.parametrize(("name", "text", "calls"), SHAPES)
def test_other_ways_to_write_a_call(name: str, text: str, calls: Written) -> None:
    found = message(name, [text])
    assert said(found) == list(calls) and found.content.strip() == "" and found.warnings == []
    for pieces in cuts(text):
        assert message(name, pieces) == found


def test_ids_of_the_model_are_kept() -> None:
    assert message("mistral", ["[TOOL_CALLS]f[CALL_ID]abc[ARGS]{}"]).calls[0].call_id == "abc"
    assert message("kimi", [WRITERS["kimi"][0].calls([WEATHER])]).calls[0].call_id == "functions.weather:0"


_GLUE = (" ", "\n", "{", "}", "[", "]", '"', "x", "\\", ":", ",", "(", ")", "=", "name", "é")


@dataclass(frozen=True)
class Fuzz:
    """Random outputs of pieces that formats are made of."""

    name: str
    rng: random.Random

    def text(self) -> str:
        writer = self.rng.choice(WRITERS[self.name])
        parts = [writer.opening, *self._tokens(writer), *_GLUE]
        return "".join(self.rng.choice(parts) for _ in range(self.rng.randint(1, 30)))

    def _tokens(self, writer: Writer) -> list[str]:
        text = writer.calls((PLAN, WEATHER))
        begins = [self.rng.randrange(len(text)) for _ in range(12)]
        return [text[begin : begin + self.rng.randint(1, 25)] for begin in begins]


NUM_FUZZED = 600
"""Outputs of each format; `make fuzz-parsers` reads many more."""


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_nonsense_raises_nothing_and_loses_no_text(name: str) -> None:
    rng = random.Random(name)
    fuzz = Fuzz(name, rng)
    for _ in range(NUM_FUZZED):
        text = fuzz.text()
        whole = message(name, [text])
        assert message(name, list(text)) == whole
        assert whole.calls or name == "harmony" or whole.content == text  # harmony has marks around text as well
        for call in whole.calls:
            if call.is_whole:
                assert isinstance(json.loads(call.arguments), dict), text


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>" + '{"name": ' * 5000,
        '<tool_call>{"name": "f", "arguments": ' + "[" * 5000,
        '<tool_call>{"name": "f", "arguments": "' + "[" * 100_000 + '"}',
        '<tool_call>{"name": "\\ud83d", "arguments": {}}',
    ],
    ids=["names in names", "deep arguments", "deep arguments in a text", "half a character"],
)
def test_what_is_nested_without_end_is_content(text: str) -> None:
    found = message("hermes", [text])
    assert not any(call.is_whole for call in found.calls) and found.warnings
    assert found.calls or found.content == text


def test_an_id_beside_a_function_is_the_call_s() -> None:
    text = '<tool_call>{"id": "c1", "type": "function", "function": {"name": "stop", "arguments": {}}}</tool_call>'
    assert [(call.name, call.call_id) for call in message("hermes", [text]).calls] == [("stop", "c1")]


def test_arguments_in_a_string_are_json_whatever_stands_in_their_texts() -> None:
    arguments = json.dumps('{"text": "a\nb"}')  # the inner text has a line end where JSON wants an escape
    for pieces in cuts(f'<tool_call>\n{{"name": "note", "arguments": {arguments}}}\n</tool_call>'):
        assert said(message("hermes", pieces)) == [("note", {"text": "a\nb"})]
