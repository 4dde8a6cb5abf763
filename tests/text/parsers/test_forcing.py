"""Forced calls: whatever tokens a model would take within the grammar, the parser reads calls that their schemas accept."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import jsonschema
import numpy as np
import pytest

from pdmesh.text.grammar import GrammarCompiler
from pdmesh.text.parsers.forcing import Choice, Form, grammar, opened_grammar
from pdmesh.text.parsers.registry import REASONING_FORMATS, TOOL_FORMATS
from pdmesh.text.tokenizer import Tokenizer
from tests.support.tiny_models import IM_END, VOCAB_SIZE, write_byte_tokenizer
from tests.text.parsers.test_formats import message

SCHEMAS: dict[str, dict[str, Any]] = {
    "weather": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "set": {
        "type": "object",
        "properties": {
            "mode": {"type": "string", "enum": ["on", "off"]},
            "levels": {"type": "array", "items": {"type": "number"}, "maxItems": 3},
            "deep": {"$ref": "#/$defs/deep"},
        },
        "required": ["mode", "levels"],
        "additionalProperties": False,
        "$defs": {
            "deep": {"type": "object", "properties": {"x": {"type": "boolean"}}, "required": ["x"], "additionalProperties": False}
        },
    },
    "stop": {"type": "object", "properties": {}, "additionalProperties": False},
    "mail/get-all": {
        "type": "object",
        "properties": {
            "user-id": {"type": "string"},
            "state": {"enum": ["a", None, 3]},
            "zip": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "size": {"type": ["number", "null"]},
        },
        "required": ["user-id", "state"],
        "additionalProperties": False,
    },
    "walk": {
        "$ref": "#/$defs/node",
        "$defs": {
            "node": {
                "type": "object",
                "properties": {"label": {"type": "string"}, "next": {"$ref": "#/$defs/node"}},
                "required": ["label"],
                "additionalProperties": False,
            }
        },
    },
}
LONGEST = 1500
FORMS = [
    (name, form)
    for name, tool_format in TOOL_FORMATS.items()
    for form in (tool_format.form, *(variant.form for variant in tool_format.variants))
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("bytes")
    write_byte_tokenizer(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return Tokenizer.load(folder)


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer.to_json(), VOCAB_SIZE, [IM_END])


def drawn(compiler: GrammarCompiler, tokenizer: Tokenizer, source: str, rng: random.Random) -> str:
    """An output of random tokens that the grammar allows; what can end a text is likelier, so that it ends."""
    matcher = compiler.compile("grammar", source).matcher()
    taken: list[int] = []
    while len(taken) < LONGEST:
        allowed = np.flatnonzero(np.unpackbits(matcher.allowed().view(np.uint8), bitorder="little"))
        if IM_END in allowed and (len(allowed) == 1 or rng.random() < 0.5):
            return tokenizer.decode(taken)
        endings = [token for token in allowed if token in ENDINGS]
        taken.append(int(rng.choice(endings if endings and rng.random() < 0.5 else list(allowed))))
        matcher.take(taken[-1])
        assert not matcher.failed
    return ""


ENDINGS = {*b'"}]),<\n'}


@pytest.mark.parametrize(("name", "form"), FORMS)
def test_every_output_within_the_grammar_is_calls_that_validate(
    name: str, form: Form, compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    rng, num_ended = random.Random(name), 0
    for names, is_parallel in ((list(SCHEMAS), True), *(([each], False) for each in SCHEMAS)) * 3:
        source = grammar(form, SCHEMAS, Choice(names, is_parallel), {})
        text = drawn(compiler, tokenizer, source, rng)
        if not text:
            continue
        num_ended += 1
        found = make_calls(name, text)
        assert found, text
        assert is_parallel or len(found) == 1, text
        for tool, arguments in found:
            assert tool in names
            jsonschema.validate(arguments, SCHEMAS[tool])
    assert num_ended >= 6


def make_calls(name: str, text: str) -> list[tuple[str, Any]]:
    said = message(name, [text])
    assert said.warnings == [] and said.content.strip() == "" and all(call.is_whole for call in said.calls), text
    return [(call.name, json.loads(call.arguments)) for call in said.calls]


def test_thoughts_end_before_a_forced_call(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    choice = Choice(["stop"], is_parallel=False, thoughts=REASONING_FORMATS["think"], has_begun=True)
    matcher = compiler.compile("grammar", grammar(TOOL_FORMATS["hermes"].form, SCHEMAS, choice, {})).matcher()
    output = tokenizer.encode("Let me see, <b>.</think>", add_special_tokens=False)
    for token in output:
        matcher.take(token)
    while matcher.forced not in (None, IM_END):
        output.append(matcher.forced or 0)
        matcher.take(output[-1])
    found = message("hermes", [tokenizer.decode(output)], "think", has_begun=True)
    assert found.thoughts == "Let me see, <b>." and [call.name for call in found.calls] == ["stop"]


@pytest.mark.parametrize(
    ("name", "reasoning"), [("hermes", "think"), ("mistral", "mistral"), ("glm", "granite"), ("harmony", "none")]
)
@pytest.mark.parametrize("thought", ["", "Let me see: [1], <b>."])
def test_a_model_may_think_first(
    name: str, reasoning: str, thought: str, compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    marks = TOOL_FORMATS[name].thoughts or REASONING_FORMATS[reasoning]
    choice = Choice(["stop"], is_parallel=False, thoughts=marks)
    matcher = compiler.compile("grammar", grammar(TOOL_FORMATS[name].form, SCHEMAS, choice, {})).matcher()
    begin = f"{marks.open}{thought}{marks.close}" if thought else TOOL_FORMATS[name].form.before.split("NAME")[0][:12]
    output = tokenizer.encode(TOOL_FORMATS[name].form.begin + begin if not thought else begin, add_special_tokens=False)
    for token in output:
        matcher.take(token)
    while matcher.forced not in (None, IM_END):
        output.append(matcher.forced or 0)
        matcher.take(output[-1])
    assert not matcher.failed
    found = message(name, [tokenizer.decode(output)], reasoning)
    assert found.thoughts == thought and [call.name for call in found.calls] == ["stop"] and not found.content.strip()


def test_a_mark_that_is_a_token_is_forced_as_that_token(compiler: GrammarCompiler) -> None:
    source = grammar(TOOL_FORMATS["mistral"].form, SCHEMAS, Choice(["stop"]), {"[TOOL_CALLS]": VOCAB_SIZE - 1})
    assert f"<[{VOCAB_SIZE - 1}]>" in source
    assert "[TOOL_CALLS]" not in source


def test_a_tool_that_is_not_there_is_refused() -> None:
    with pytest.raises(ValueError, match="tool_choice: fly is none of the tools; name one of weather, set, stop"):
        grammar(TOOL_FORMATS["hermes"].form, SCHEMAS, Choice(["fly"]), {})


OPENINGS = {
    "hermes": "<tool_call>",
    "mistral": "[TOOL_CALLS]",
    "deepseek": "<｜tool▁calls▁begin｜>",
    "qwen_coder": "<tool_call>",
    "glm": "<tool_call>",
    "kimi": "<|tool_calls_section_begin|>",
    "granite": "<|tool_call|>",
    "phi": "functools",
    "gemma": "```tool_code",
    "minimax": "<minimax:tool_call>",
}


@pytest.mark.parametrize("name", OPENINGS)
def test_a_call_that_the_model_opens_is_one(name: str, compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    form, opening = TOOL_FORMATS[name].form, OPENINGS[name]
    source = opened_grammar(form, opening, SCHEMAS, Choice(["stop"]), {})
    for before in ("", f"Text, {opening[:-1]} and more. "):
        matcher = compiler.compile("grammar", source).matcher()
        output = tokenizer.encode(before + opening, add_special_tokens=False)
        for token in output:
            matcher.take(token)
        while matcher.forced not in (None, IM_END):
            output.append(matcher.forced or 0)
            matcher.take(output[-1])
        assert not matcher.failed
        text = tokenizer.decode(output)
        assert '"' in text[len(before + opening) :] or "stop" in text[len(before + opening) :], text


@pytest.mark.parametrize("name", OPENINGS)
def test_text_without_calls_stays_free(name: str, compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    source = opened_grammar(TOOL_FORMATS[name].form, OPENINGS[name], SCHEMAS, Choice(list(SCHEMAS)), {})
    matcher = compiler.compile("grammar", source).matcher()
    for token in tokenizer.encode('Anything: {"a": [1]}, <b>, `code`, é 東.', add_special_tokens=False):
        matcher.take(token)
    assert not matcher.failed and matcher.allowed()[IM_END // 32] >> IM_END % 32 & 1


def test_thoughts_that_have_begun_are_free_where_marks_are_text(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    choice = Choice(["stop"], thoughts=REASONING_FORMATS["think"], has_begun=True)
    source = opened_grammar(TOOL_FORMATS["hermes"].form, "<tool_call>", SCHEMAS, choice, {})
    for text, is_forced in (
        ("a < b </thin <tool_call>x", False),
        ("<tool_call>x</think>y", False),
        ("x</think>y <tool_call>", True),
        ("</think>", False),
        ("", False),
    ):
        matcher = compiler.compile("grammar", source).matcher()
        for token in tokenizer.encode(text, add_special_tokens=False):
            matcher.take(token)
        assert not matcher.failed and (matcher.forced is not None) == is_forced, text
        assert bool(matcher.allowed()[IM_END // 32] >> IM_END % 32 & 1) != is_forced


def test_a_format_without_a_mark_is_not_forced_in_the_middle() -> None:
    with pytest.raises(ValueError, match="no mark"):
        opened_grammar(TOOL_FORMATS["llama"].form, "", SCHEMAS, Choice(["stop"]), {})


KIMI = "<|tool_calls_section_begin|><|tool_call_begin|>functions.stop:{}<|tool_call_argument_begin|>{{}}<|tool_call_end|>"


@pytest.mark.parametrize(
    ("name", "template", "call"),
    [
        ("mistral", "[TOOL_CALLS]", '[TOOL_CALLS][{"name": "stop", "arguments": {}}]'),
        ("mistral", "[TOOL_CALLS]{{ name }}[ARGS]", "[TOOL_CALLS]stop[ARGS]{}"),
        (
            "deepseek",
            "",
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>stop\n```json\n{}\n```<｜tool▁call▁end｜>",
        ),
        (
            "deepseek",
            "<｜tool▁call▁begin｜>{{ name }}",
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>stop<｜tool▁sep｜>{}<｜tool▁call▁end｜>",
        ),
        ("granite", "<|tool_call|>", '<|tool_call|>[{"name": "stop", "arguments": {}}]'),
        ("granite", "<tool_call>", '<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>'),
        ("phi", "functools", 'functools[{"name": "stop", "arguments": {}}]'),
        ("phi", "<|/tool_call|>", '<|tool_call|>[{"name": "stop", "arguments": {}}]<|/tool_call|>'),
        ("kimi", "", KIMI.format(0)),
        ("kimi", "", KIMI.format(12)),
    ],
)
def test_a_call_is_forced_as_the_template_writes_it(
    name: str, template: str, call: str, compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    form, opening = TOOL_FORMATS[name].written_by(template)
    assert call.startswith(opening)
    tokens = tokenizer.encode(call, add_special_tokens=False)
    choice = Choice(list(SCHEMAS))
    for source in (grammar(form, SCHEMAS, choice, {}), opened_grammar(form, opening, SCHEMAS, choice, {})):
        assert compiler.compile("grammar", source).first_stray(tokens) is None
    assert make_calls(name, call) == [("stop", {})]


HEADER_MARKS = ("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>")


@pytest.mark.parametrize(
    "before", ["", "analysis<|message|>Let me see, commentary to=functions.<|end|><|start|>assistant<|channel|>"]
)
def test_a_message_of_harmony_that_is_headed_as_a_call_is_one(
    before: str, compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    marks = {mark: VOCAB_SIZE - 1 - number for number, mark in enumerate(HEADER_MARKS)}
    form, opening = TOOL_FORMATS["harmony"].form, TOOL_FORMATS["harmony"].opening
    source = opened_grammar(form, opening, SCHEMAS, Choice(list(SCHEMAS)), marks)

    def tokens(text: str) -> list[int]:
        pieces = re.split("(" + "|".join(map(re.escape, HEADER_MARKS)) + ")", text)
        parts = [[marks[piece]] if piece in marks else tokenizer.encode(piece, add_special_tokens=False) for piece in pieces]
        return [token for part in parts for token in part]

    begin = f"<|channel|>{before}"
    compiled = compiler.compile("grammar", source)
    for right in (
        'commentary to=functions.weather <|constrain|>json<|message|>{"city": "Rome"}<|call|>',
        "final<|message|>It is commentary to=functions.<|end|>",
        "commentary<|message|>First I look.<|end|><|start|>assistant<|channel|>commentary to=functions.stop <|constrain|>json"
        "<|message|>{}<|call|>",
    ):
        assert compiled.first_stray(tokens(begin + right)) is None, right
    for wrong in (
        "commentary to=functions.fly <|constrain|>json<|message|>{}",
        'commentary to=functions.weather <|constrain|>json<|message|>{"days": 3',
        "commentary to=functions.stop<|message|>",
    ):
        assert compiled.first_stray(tokens(begin + wrong)) is not None, wrong
