"""The grammars of requests with tools: whatever a model draws within one, the parser reads calls; marks are special tokens."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer

from pdmesh.runtime.errors import InvalidArgument
from pdmesh.v1 import common_pb2, mesh_pb2
from router.lifecycle.output import TokenChunk
from router.tokenization import chat_prompt
from router.tokenization.call_grammar import constrained
from router.tokenization.chat_prompt import OfferedTools
from router.tokenization.prepared_request import FormatNames, OutputFormat, PreparedRequest, ServedModel, format_of, load
from tests.router.mesh import write_model
from tests.router.test_output import Client
from tests.support.tiny_models import IM_END

MARKS = [f"<{name}>" for name in ("tool_call", "/tool_call", "think", "/think")]
MARKS += ["[TOOL_CALLS]", *(f"<|{name}|>" for name in ("start", "channel", "message", "call", "end"))]
SCHEMAS: dict[str, dict[str, Any]] = {
    "set": {
        "type": "object",
        "properties": {"mode": {"enum": ["on", "off"]}, "level": {"type": "integer", "minimum": 0, "maximum": 99}},
        "required": ["mode"],
        "additionalProperties": False,
    },
    "stop": {"type": "object", "properties": {}, "additionalProperties": False},
}
CALLS = common_pb2.FINISH_REASON_TOOL_CALLS


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    return marked_model(tmp_path_factory.mktemp("marks"))


def marked_model(at: Path) -> ServedModel:
    """A model whose marks are special tokens."""
    folder = write_model(at)
    backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in MARKS])
    backend.save(str(folder / "tokenizer.json"))
    config = json.loads((folder / "config.json").read_text())
    config["eos_token_id"] = [IM_END, backend.token_to_id("<|call|>")]
    (folder / "config.json").write_text(json.dumps(config))
    return load({"tiny": str(folder)})["tiny"]


def wanted(model: ServedModel, tools: str, offered: OfferedTools, prompt: str = "") -> OutputFormat:
    found = format_of(model.tokenizer, FormatNames(tools, "think"), offered.schemas, prompt)
    assert found is not None
    return found


def drawn(model: ServedModel, sampling: common_pb2.SamplingParams, begins: list[int], rng: random.Random) -> list[int]:
    """An output of random tokens that the grammar allows, behind a beginning; what can end a text is likelier."""
    matcher, taken = model.grammars.compile("grammar", sampling.constraint.grammar).matcher(), list[int]()
    ends = {*model.eos_token_ids, *model.tokenizer.special_tokens.values(), *model.tokenizer.encode('"}]')}
    while len(taken) < 1500:
        allowed = np.flatnonzero(np.unpackbits(matcher.allowed().view(np.uint8), bitorder="little"))
        likely = [token for token in allowed if token in ends]
        pick = begins[len(taken)] if len(taken) < len(begins) else int(rng.choice(likely or list(allowed)))
        assert pick in allowed
        taken.append(pick)
        if pick in model.eos_token_ids:
            return taken
        matcher.take(pick)
        assert not matcher.failed
    raise AssertionError("the output did not end")


def read(model: ServedModel, output_format: OutputFormat, tokens: list[int]) -> mesh_pb2.Delta:
    params = common_pb2.SamplingParams(n=1, max_tokens=2000, seed=1)
    client = Client(PreparedRequest("id", model, (1, 2), params, (), output_format=output_format))
    client.feed(TokenChunk(0, 0, tokens, finish_reason=common_pb2.FINISH_REASON_STOP))
    (delta,) = client.deltas
    return delta


def check(delta: mesh_pb2.Delta, *, most: int) -> None:
    assert delta.finish_reason == CALLS and not delta.warning and 1 <= len(delta.tool_calls) <= most
    for call in delta.tool_calls:
        jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name])


@pytest.mark.parametrize("tools", ["hermes", "mistral", "harmony", "llama", "qwen_coder", "pythonic", "json"])
@pytest.mark.parametrize("is_parallel", [True, False])
async def test_required_calls(model: ServedModel, tools: str, is_parallel: bool) -> None:
    offered = OfferedTools(SCHEMAS, names=tuple(SCHEMAS), is_required=True, is_parallel=is_parallel)
    output_format = wanted(model, tools, offered)
    sampling = await constrained(model, common_pb2.SamplingParams(), offered, output_format, forces_opened=False)
    for seed in range(5):
        delta = read(model, output_format, drawn(model, sampling, [], random.Random(seed)))
        check(delta, most=16 if is_parallel else 1)
        assert not delta.text.strip()


async def test_required_calls_come_behind_thoughts_that_have_begun(model: ServedModel) -> None:
    offered = OfferedTools(SCHEMAS, names=("stop",), is_required=True, is_parallel=False)
    output_format = wanted(model, "hermes", offered, "<think>")
    sampling = await constrained(model, common_pb2.SamplingParams(), offered, output_format, forces_opened=False)
    begins = model.tokenizer.encode("I stop. It is <b> time.</think>")
    delta = read(model, output_format, drawn(model, sampling, begins, random.Random(1)))
    assert delta.reasoning == "I stop. It is <b> time."
    check(delta, most=1)


@pytest.mark.parametrize(
    ("tools", "thought", "opening"),
    [
        ("hermes", "<think>I stop.</think>", "<tool_call>"),
        ("harmony", "<|channel|>analysis<|message|>I stop.<|end|>", "<|channel|>commentary"),
    ],
)
async def test_a_model_may_think_before_a_required_call(model: ServedModel, tools: str, thought: str, opening: str) -> None:
    offered = OfferedTools(SCHEMAS, names=("stop",), is_required=True, is_parallel=False)
    output_format = wanted(model, tools, offered)
    sampling = await constrained(model, common_pb2.SamplingParams(), offered, output_format, forces_opened=False)
    for begins, reasoning in ((thought, "I stop."), (opening, "")):
        delta = read(model, output_format, completed(model, sampling.constraint.grammar, begins))
        assert delta.reasoning == reasoning
        check(delta, most=1)


def completed(model: ServedModel, source: str, begins: str, *, ends: bool = False) -> list[int]:
    """An output that begins so, with what the grammar forces behind it. `ends`: where nothing more is forced, it may end."""
    matcher, tokens = model.grammars.compile("grammar", source).matcher(), model.tokenizer.encode(begins)
    for token in tokens:
        matcher.take(token)
    while tokens and matcher.forced is not None and tokens[-1] not in model.eos_token_ids:
        tokens.append(matcher.forced)
        matcher.take(tokens[-1])
    if ends and (not tokens or tokens[-1] not in model.eos_token_ids):
        assert matcher.allowed()[IM_END // 32] >> IM_END % 32 & 1
        tokens.append(IM_END)
    assert not matcher.failed
    return tokens


async def test_no_thoughts_come_where_the_prompt_has_ended_them(model: ServedModel) -> None:
    offered = OfferedTools(SCHEMAS, names=("stop",), is_required=True, is_parallel=False)
    output_format = wanted(model, "hermes", offered, "<think>\n\n</think>\n\n")
    assert output_format.thoughts is None and not output_format.has_begun
    sampling = await constrained(model, common_pb2.SamplingParams(), offered, output_format, forces_opened=False)
    matcher = model.grammars.compile("grammar", sampling.constraint.grammar).matcher()
    assert matcher.forced == model.tokenizer.special_tokens["<tool_call>"]


async def test_one_call_alone_may_be_opened_where_calls_are_not_parallel(model: ServedModel) -> None:
    opening = model.tokenizer.special_tokens["<tool_call>"]
    for is_parallel in (True, False):
        offered = OfferedTools(SCHEMAS, names=("stop",), is_parallel=is_parallel)
        output_format = wanted(model, "hermes", offered)
        sampling = await constrained(model, common_pb2.SamplingParams(), offered, output_format, forces_opened=True)
        matcher = model.grammars.compile("grammar", sampling.constraint.grammar).matcher()
        matcher.take(opening)
        while matcher.forced is not None:
            matcher.take(matcher.forced)
        assert bool(matcher.allowed()[opening // 32] >> opening % 32 & 1) == is_parallel


@pytest.mark.parametrize(("tools", "opening"), [("hermes", "<tool_call>"), ("mistral", "[TOOL_CALLS]")])
async def test_a_call_that_the_model_opens_follows_its_schema(model: ServedModel, tools: str, opening: str) -> None:
    offered = OfferedTools(SCHEMAS, names=tuple(SCHEMAS))
    output_format = wanted(model, tools, offered)
    sampling = await constrained(model, common_pb2.SamplingParams(), offered, output_format, forces_opened=True)
    for seed in range(5):
        begins = model.tokenizer.encode(f"<think>\n</think>\n{opening}")
        check(read(model, output_format, drawn(model, sampling, begins, random.Random(seed))), most=100)


async def test_thoughts_that_have_begun_stay_free_and_a_call_behind_them_is_forced(model: ServedModel) -> None:
    offered = OfferedTools(SCHEMAS, names=("stop",), is_parallel=False)
    output_format = wanted(model, "hermes", offered, "<think>")
    sampling = await constrained(model, common_pb2.SamplingParams(), offered, output_format, forces_opened=True)
    thought = "I could write <tool_call>no call</tool_call>."
    delta = read(
        model, output_format, completed(model, sampling.constraint.grammar, f"{thought}</think>Now:<tool_call>", ends=True)
    )
    assert (delta.reasoning, delta.text) == ("I could write no call.", "Now:")
    check(delta, most=1)
    for unended in ("", thought, "a < b", "a</think>b", "a</think>b</think>c"):
        completed(model, sampling.constraint.grammar, unended, ends=True)


async def test_text_stays_free_until_then(model: ServedModel) -> None:
    offered = OfferedTools(SCHEMAS, names=tuple(SCHEMAS))
    output_format = wanted(model, "hermes", offered)
    sampling = await constrained(model, common_pb2.SamplingParams(), offered, output_format, forces_opened=True)
    begins = [*model.tokenizer.encode('<think>{"a" [b]</think>It is "so", <b>.'), IM_END]
    delta = read(model, output_format, drawn(model, sampling, begins, random.Random(1)))
    assert (delta.reasoning, delta.text) == ('{"a" [b]', 'It is "so", <b>.')


async def test_members_that_a_schema_does_not_name_are_not_forced(model: ServedModel) -> None:
    open_schema = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 3}}}
    for more, is_closed in (({}, True), ({"additionalProperties": True}, False), ({"patternProperties": {}}, False)):
        offered = OfferedTools({"a": {**open_schema, **more}}, names=("a",), is_required=True)
        output_format = wanted(model, "hermes", offered)
        sampling = await constrained(model, common_pb2.SamplingParams(), offered, output_format, forces_opened=False)
        assert ('"additionalProperties": false' in sampling.constraint.grammar) == is_closed


async def test_engines_of_others_get_no_grammar_that_nobody_asked_for(model: ServedModel) -> None:
    plain = OfferedTools(SCHEMAS, names=tuple(SCHEMAS))
    strict = OfferedTools(SCHEMAS, frozenset({"set"}), tuple(SCHEMAS))
    for offered, has_grammar in ((plain, False), (strict, True)):
        output_format = wanted(model, "hermes", offered)
        sampling = await constrained(model, common_pb2.SamplingParams(), offered, output_format, forces_opened=False)
        assert sampling.HasField("constraint") == has_grammar


async def test_what_is_not_read_cannot_be_required(model: ServedModel) -> None:
    offered = OfferedTools(SCHEMAS, names=tuple(SCHEMAS), is_required=True)
    for reasoning in ("none", "think"):
        output_format = format_of(model.tokenizer, FormatNames("none", reasoning), offered.schemas, "")
        with pytest.raises(InvalidArgument, match="--tool-parser none") as refused:
            await constrained(model, common_pb2.SamplingParams(), offered, output_format, forces_opened=True)
        assert refused.value.field == "tool_choice"


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"tools": [{"name": ""}]}, "tools[0].name"),
        ({"tools": [{"name": "a"}, {"name": "a"}]}, "tools[1].name"),
        ({"tools": [{"name": "a", "parameters": "{"}]}, "tools[0].parameters"),
        ({"tools": [{"name": "a", "parameters": "[]"}]}, "tools[0].parameters"),
        ({"tools": [{"name": "a", "parameters": '{"minimum": NaN}'}]}, "tools[0].parameters"),
        ({"tools": [{"name": "a", "parameters": "[" * 5000}]}, "tools[0].parameters"),
        ({"tools": [{"name": "a"}] * 1025}, "tools"),
        ({"tools": [{"name": "a", "description": "x" * 2000}]}, "tools"),
        ({"tool_choice": 9}, "tool_choice"),
        ({"tool_names": ["a"]}, "tool_choice"),
        ({"tool_choice": 3}, "tool_choice"),
        ({"chat_template_kwargs": "3"}, "chat_template_kwargs"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"name": ""}]}]}, "messages[0].tool_calls[0].name"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"name": "a", "arguments": "1"}]}]},
            "messages[0].tool_calls[0].arguments",
        ),
    ],
)
def test_what_is_wrong_is_named(wrong: dict[str, Any], field: str) -> None:
    request = mesh_pb2.ChatRequest(**{"messages": [{"role": "user", "content": "x"}], **wrong})
    with pytest.raises(InvalidArgument) as refused:
        chat_prompt.of_request(request, 1500 if field == "tools" and len(request.tools) == 1 else 1 << 20)
    assert refused.value.field == field and refused.value.message.startswith(f"{field}: ")
