"""The grammar of an answer that a constraint describes, behind thoughts: whatever is drawn, the answer is what was asked for."""

from __future__ import annotations

import json
import random
import re
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest

from pdmesh.runtime.errors import InvalidArgument
from pdmesh.v1 import common_pb2
from router.tokenization.call_grammar import behind_thoughts
from router.tokenization.prepared_request import FormatNames, OutputFormat, ServedModel, format_of, load
from tests.router.mesh import write_model
from tests.router.test_call_grammar import drawn, marked_model, read

STOP = common_pb2.FINISH_REASON_STOP
SCHEMA = {
    "type": "object",
    "properties": {"mode": {"enum": ["on", "off"]}, "level": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["mode", "level"],
    "additionalProperties": False,
}
REGEX = r"[a-c]{2}/[0-9]\\n(x|\/)"
CHOICES = ('yes, "so"', "no/\n")


@pytest.fixture(scope="module", params=["special", "spelled"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    """With marks that are tokens of their own, or are spelled."""
    folder: Path = tmp_path_factory.mktemp("model")
    return marked_model(folder) if request.param == "special" else load({"tiny": str(write_model(folder))})["tiny"]


def wanted(model: ServedModel, tools: str, prompt: str) -> OutputFormat | None:
    found = format_of(model.tokenizer, FormatNames(tools, "none" if tools == "harmony" else "think"), {}, prompt)
    return None if found is None else replace(found, is_constrained=True)


def asked(kind: str) -> common_pb2.SamplingParams:
    constraint = {
        "json_schema": common_pb2.Constraint(json_schema=json.dumps(SCHEMA)),
        "regex": common_pb2.Constraint(regex=REGEX),
        "choice": common_pb2.Constraint(choice=common_pb2.Alternatives(values=CHOICES)),
    }[kind]
    return common_pb2.SamplingParams(temperature=0.5, constraint=constraint)


def check(kind: str, text: str) -> None:
    if kind == "json_schema":
        jsonschema.validate(json.loads(text), SCHEMA)
        assert ": " in text
    else:
        assert re.fullmatch(REGEX, text) if kind == "regex" else text in CHOICES


@pytest.mark.parametrize("kind", ["json_schema", "regex", "choice"])
@pytest.mark.parametrize(("tools", "prompt", "begins"), [
    ("none", "…<think>\n", "Hm.</think>"), ("none", "…", "<think>Hm.</think>"), ("none", "…", "ANSWER"),
    ("harmony", "…", "<|channel|>analysis<|message|>Hm.<|end|>"), ("harmony", "…", "<|channel|>final"),
])  # fmt: skip
async def test_whatever_is_drawn_the_answer_is_what_was_asked_for(
    model: ServedModel, kind: str, tools: str, prompt: str, begins: str
) -> None:
    output_format = wanted(model, tools, prompt)
    assert output_format is not None
    held = await behind_thoughts(model, asked(kind), output_format)
    assert held is not None and held.temperature == 0.5
    beginning = model.tokenizer.encode({"json_schema": "{", "regex": "a", "choice": "y"}[kind] if begins == "ANSWER" else begins)
    for seed in range(3):
        delta = read(model, output_format, drawn(model, held, beginning, random.Random(seed)))
        check(kind, delta.text)
        assert delta.finish_reason == STOP and not delta.warning
        assert delta.reasoning == ("Hm." if "Hm." in begins else "")


async def test_where_nothing_is_thought_the_constraint_holds_from_the_first_token_on(model: ServedModel) -> None:
    thinking = wanted(model, "none", "…<think>")
    assert await behind_thoughts(model, asked("regex"), None) is None
    assert await behind_thoughts(model, asked("regex"), wanted(model, "none", "…<think>\n\n</think>\n\n")) is None
    grammar = common_pb2.SamplingParams(constraint=common_pb2.Constraint(grammar='start: "a"'))
    assert await behind_thoughts(model, grammar, thinking) is None
    with pytest.raises(InvalidArgument) as refused:
        await behind_thoughts(model, common_pb2.SamplingParams(constraint=common_pb2.Constraint(regex="(")), thinking)
    assert refused.value.field == "sampling.constraint.regex"


async def test_a_schema_may_have_a_style_of_its_own(model: ServedModel) -> None:
    schema = {**SCHEMA, "x-guidance": {"item_separator": ",", "key_separator": ":", "whitespace_flexible": False}}
    sampling = common_pb2.SamplingParams(constraint=common_pb2.Constraint(json_schema=json.dumps(schema)))
    output_format = wanted(model, "none", "…<think>")
    assert output_format is not None
    held = await behind_thoughts(model, sampling, output_format)
    assert held is not None
    text = read(model, output_format, drawn(model, held, model.tokenizer.encode("Hm.</think>"), random.Random(1))).text
    jsonschema.validate(json.loads(text), SCHEMA)
    assert " " not in text
