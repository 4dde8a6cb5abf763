"""From tokens to calls and reasoning: however tokens are grouped, and wherever a stream is resumed, the pieces are the same."""

from __future__ import annotations

import json
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer

from pdmesh.text.detokenizer import ChoiceText, VisibleMarks
from pdmesh.text.parsers.registry import TOOL_FORMATS
from pdmesh.v1 import common_pb2, mesh_pb2
from router.lifecycle.output import UNFINISHED, TokenChunk
from router.tokenization.prepared_request import FormatNames, OutputFormat, PreparedRequest, ServedModel, format_of, load
from tests.router.mesh import write_model
from tests.router.test_output import Client
from tests.text.parsers import fuzz, recorded
from tests.text.samples import byte_level_backend

STOP, CALLS = common_pb2.FINISH_REASON_STOP, common_pb2.FINISH_REASON_TOOL_CALLS
LENGTH = common_pb2.FINISH_REASON_LENGTH
SCHEMAS: dict[str, dict[str, Any]] = {"weather": {"type": "object", "properties": {"city": {"type": "string"}}}}
MARKS = ("[TOOL_CALLS]", "[ARGS]", "<think>", "</think>")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    """With the marks of Mistral's calls and of thoughts as special tokens."""
    folder = write_model(tmp_path_factory.mktemp("marks"))
    path = folder / "tokenizer.json"
    backend = Tokenizer.from_file(str(path))
    backend.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in MARKS])
    backend.save(str(path))
    return load({"tiny": str(folder)})["tiny"]


def prepared(
    model: ServedModel, prompt: str = "", *, stop: tuple[str, ...] = (), max_calls: int | None = None
) -> PreparedRequest:
    names = FormatNames("mistral", "think")
    output_format = format_of(model.tokenizer, names, SCHEMAS, prompt, max_calls=max_calls)
    params = common_pb2.SamplingParams(n=1, max_tokens=1000, seed=1)
    return PreparedRequest("id", model, (1, 2), params, stop, output_format=output_format)


def merged(deltas: list[mesh_pb2.Delta]) -> dict[str, Any]:
    """What deltas add up to."""
    calls: dict[int, list[str]] = {}
    for piece in (each for delta in deltas for each in delta.tool_calls):
        assert bool(piece.name) == (piece.index not in calls)
        call = calls.setdefault(piece.index, [piece.id, piece.name, ""])
        call[2] += piece.arguments
    return {
        "text": "".join(delta.text for delta in deltas),
        "reasoning": "".join(delta.reasoning for delta in deltas),
        "calls": list(calls.values()),
        "warnings": [delta.warning for delta in deltas if delta.warning],
        "finish": [delta.finish_reason for delta in deltas if delta.finish_reason],
    }


def said(request: PreparedRequest, tokens: list[int], cuts: list[int], reason: common_pb2.FinishReason.ValueType = STOP) -> Any:
    client = Client(request)
    ends = [*sorted({cut % len(tokens) for cut in cuts} - {0}), len(tokens)]
    for start, end in zip([0, *ends[:-1]], ends, strict=True):
        client.feed(TokenChunk(0, start, tokens[start:end], finish_reason=reason if end == len(tokens) else UNFINISHED))
    return merged(client.deltas)


THOUGHT_AND_CALLS = (
    '<think>Let me [ARGS] see.</think>Well. [TOOL_CALLS][{"name": "weather", "arguments": {"city": "Köln"}}, '
    '{"name": "weather", "arguments": {"city": "Łódź"}}]'
)


def test_pieces_are_the_same_in_every_grouping(model: ServedModel) -> None:
    tokens = model.tokenizer.encode(THOUGHT_AND_CALLS)
    wanted = said(prepared(model), tokens, [])
    assert (wanted["text"], wanted["reasoning"], wanted["finish"]) == ("Well.", "Let me  see.", [CALLS])
    assert [json.loads(call[2]) for call in wanted["calls"]] == [{"city": "Köln"}, {"city": "Łódź"}]
    assert len({call[0] for call in wanted["calls"]}) == 2 and all(len(call[0]) == 9 for call in wanted["calls"])
    for step in (1, 2, 3, 7, 50):
        assert said(prepared(model), tokens, list(range(0, len(tokens), step))) == wanted


def in_order(delta: mesh_pb2.Delta) -> list[str]:
    """What a delta brings, part by part: text, reasoning in brackets, names of calls that begin in angle brackets."""
    text, reasoning, calls = delta.text, delta.reasoning, [f"<{piece.name}>" if piece.name else "" for piece in delta.tool_calls]
    if not delta.parts:
        return [each for each in (text, reasoning and f"({reasoning})", *calls) if each]
    found = []
    for part in delta.parts:
        assert len(part.ListFields()) == 1
        found += [text[: part.text_chars], f"({reasoning[: part.reasoning_chars]})", *calls[: part.num_tool_calls]]
        text, reasoning = text[part.text_chars :], reasoning[part.reasoning_chars :]
        calls = calls[part.num_tool_calls :]
    assert not (text or reasoning or calls)
    return [each for each in found if each not in ("", "()")]


def test_parts_say_in_which_order_the_model_wrote(model: ServedModel) -> None:
    tokens = model.tokenizer.encode(f"{THOUGHT_AND_CALLS} And so. ")
    for step in (1, 2, 5, 30, 1000):
        client = Client(prepared(model))
        for start in range(0, len(tokens), step):
            piece = tokens[start : start + step]
            client.feed(TokenChunk(0, start, piece, finish_reason=STOP if start + step >= len(tokens) else UNFINISHED))
        found = "".join(each for delta in client.deltas for each in in_order(delta)).replace(")(", "")
        assert found == "(Let me  see.)Well.<weather><weather>And so. ", step
        assert all(len(delta.parts) != 1 for delta in client.deltas)


def test_a_resumed_stream_goes_on_with_the_same_pieces(model: ServedModel) -> None:
    tokens = model.tokenizer.encode(THOUGHT_AND_CALLS)
    wanted = said(prepared(model), tokens, [])
    for at in range(1, len(tokens)):
        before = Client(prepared(model))
        before.feed(TokenChunk(0, 0, tokens[:at]))
        after = Client(prepared(model), [common_pb2.EmittedChoice(index=0, token_ids=tokens[:at])])
        assert after.deltas == []
        after.feed(TokenChunk(0, at, tokens[at:], finish_reason=STOP))
        assert merged([*before.deltas, *after.deltas]) == wanted, at


def test_what_is_no_call_is_text_without_the_mark_and_with_a_warning(model: ServedModel) -> None:
    found = said(prepared(model), model.tokenizer.encode('[TOOL_CALLS][{"nom": 1}] end [ARGS]'), [])
    assert found["text"] == '[{"nom": 1}] end ' and found["calls"] == [] and found["finish"] == [STOP]
    assert found["warnings"] == ["'nom' is no part of a call"]


def test_a_mark_that_other_tokens_spell_is_text(model: ServedModel) -> None:
    mark = model.tokenizer.encode("[TOOL_CALLS]")
    spelled = [token for character in '{"not [ARGS]": <think>' for token in model.tokenizer.encode(character)]
    found = said(prepared(model), [*mark, *spelled], [])
    assert found["text"] == '{"not [ARGS]": <think>' and found["calls"] == [] and found["warnings"]


def test_a_call_that_is_cut_off_keeps_the_reason_of_its_end(model: ServedModel) -> None:
    tokens = model.tokenizer.encode('[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Kö')
    found = said(prepared(model), tokens, [], LENGTH)
    assert found["finish"] == [LENGTH] and found["calls"][0][1:] == ["weather", '{"city": "Kö'] and found["warnings"]


def test_a_prompt_that_ends_within_thoughts(model: ServedModel) -> None:
    found = said(prepared(model, "…<think>\n"), model.tokenizer.encode("So be it.</think>\n\nYes."), [])
    assert (found["reasoning"], found["text"], found["finish"]) == ("So be it.", "Yes.", [STOP])


def test_calls_beyond_the_first_are_left_out_where_one_is_allowed(model: ServedModel) -> None:
    found = said(prepared(model, max_calls=1), model.tokenizer.encode(THOUGHT_AND_CALLS), [5, 90])
    assert [json.loads(call[2]) for call in found["calls"]] == [{"city": "Köln"}]
    assert len(found["warnings"]) == 1 and "parallel_tool_calls" in found["warnings"][0] and found["finish"] == [CALLS]


def test_a_stop_string_ends_what_has_begun(model: ServedModel) -> None:
    tokens = model.tokenizer.encode("<think>One two three</think>")
    found = said(prepared(model, stop=("two",)), tokens, [])
    assert (found["reasoning"], found["text"], found["finish"]) == ("One ", "", [STOP])


def test_ids_of_calls_depend_on_the_prompt_and_the_seed(model: ServedModel) -> None:
    tokens = model.tokenizer.encode(THOUGHT_AND_CALLS)
    request = prepared(model)
    other = replace(request, sampling=common_pb2.SamplingParams(n=1, max_tokens=1000, seed=2))
    ids = [said(each, tokens, [])["calls"][0][0] for each in (request, request, other, prepared(model, "another"))]
    assert ids[0] == ids[1] and len(set(ids)) == 3


def test_a_model_without_formats_has_text_alone(model_folder: Path) -> None:
    tokenizer = load({"tiny": str(model_folder)})["tiny"].tokenizer
    assert format_of(tokenizer, FormatNames(), {}, "") is None
    found = format_of(tokenizer, FormatNames(), SCHEMAS, "")
    assert found is not None and (found.tools, found.reasoning) == ("hermes", "none")


@pytest.fixture(scope="module")
def bpe_model(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    return load({"tiny": str(write_marked_model(tmp_path_factory.mktemp("bpe")))})["tiny"]


def write_marked_model(at: Path) -> Path:
    """Write a model with tokens of several characters, and of parts of characters; the marks of all formats of calls are special
    tokens. Return its folder."""
    folder = write_model(at)
    backend = byte_level_backend()
    shown = {mark for form in TOOL_FORMATS.values() for mark in form.marks} - {"functools["}
    backend.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in sorted(shown)])
    backend.save(str(folder / "tokenizer.json"))
    config = json.loads((folder / "config.json").read_text()) | {"eos_token_id": backend.token_to_id("<|im_end|>")}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("name", recorded.names())
def test_recorded_outputs_are_the_same_in_every_cut_of_their_tokens(bpe_model: ServedModel, name: str) -> None:
    params = common_pb2.SamplingParams(n=1, max_tokens=2000, seed=1)
    for shape in recorded.shapes(name):
        output_format = format_of(bpe_model.tokenizer, FormatNames(shape.tools, shape.reasoning), recorded.SCHEMAS, "")
        assert output_format is not None
        output_format = replace(output_format, has_begun=shape.has_begun)
        request = PreparedRequest("id", bpe_model, (1, 2), params, (), output_format=output_format)
        tokens = bpe_model.tokenizer.encode(shape.output)
        whole, wanted = said(request, tokens, []), shape.message
        assert [(call[1], call[2]) for call in whole["calls"]] == [(call.name, call.arguments) for call in wanted.calls]
        assert [without_marks(whole[key], output_format) for key in ("text", "reasoning")] == [
            without_marks(text, output_format) for text in (wanted.content, wanted.thoughts)
        ]
        assert "; ".join(whole["warnings"]) == "; ".join(wanted.warnings)
        for cuts in (range(len(tokens)), *([place] for place in range(1, len(tokens)))):
            cut = said(request, tokens, [*cuts])
            assert cut | {"warnings": "; ".join(cut["warnings"])} == whole | {"warnings": "; ".join(whole["warnings"])}


def without_marks(text: str, output_format: OutputFormat) -> str:
    for mark in output_format.marks.values():
        text = text.replace(mark, "")
    return text


@pytest.mark.parametrize("tools", TOOL_FORMATS)
def test_random_tokens_are_the_same_in_every_grouping_and_none_is_lost(bpe_model: ServedModel, tools: str) -> None:
    """Tokens are marks, words, and parts of characters."""
    rng, params = random.Random(tools), common_pb2.SamplingParams(n=1, max_tokens=2000, seed=1)
    marks = [
        bpe_model.tokenizer.special_tokens[mark]
        for mark in TOOL_FORMATS[tools].marks
        if mark in bpe_model.tokenizer.special_tokens
    ]
    for _ in range(60):
        output_format = format_of(bpe_model.tokenizer, FormatNames(tools, rng.choice(["none", "think"])), recorded.SCHEMAS, "")
        assert output_format is not None
        request = PreparedRequest("id", bpe_model, (1, 2), params, (), output_format=output_format)
        stream = fuzz.drawn(rng, [tools])
        tokens = bpe_model.tokenizer.encode("".join(stream.pieces))
        for _ in range(rng.randint(0, 5)):
            tokens.insert(rng.randint(0, len(tokens)), rng.choice([*marks, rng.randrange(3, 390)]))
        if not tokens:
            continue
        whole = said(request, tokens, [])
        cut = said(request, tokens, [rng.randrange(len(tokens)) for _ in range(9)])
        assert cut | {"warnings": "; ".join(cut["warnings"])} == whole | {"warnings": "; ".join(whole["warnings"])}
        shown = VisibleMarks(bpe_model.tokenizer, output_format.marks)
        text = ChoiceText(shown, (), bpe_model.eos_token_ids)
        wanted = "".join([text.push(token).text for token in tokens]) + text.finish()
        ids = (call[0] for call in whole["calls"] if tools in ("mistral", "json", "llama"))
        found = whole["text"] + whole["reasoning"] + "".join(f"{call[1]}{call[2]}" for call in whole["calls"]) + "".join(ids)
        assert not Counter(filter(str.isalpha, filter(fuzz.PAYLOAD.__contains__, wanted))) - Counter(found), wanted


@pytest.mark.parametrize("answer", ['{"a":"</think>"}', "a</think>b", '[TOOL_CALLS][{"name": "weather", "arguments": {}}]'])
@pytest.mark.parametrize("thoughts", ["", "<think>So.</think>\n\n"])
def test_a_constrained_answer_is_text_to_the_character(model: ServedModel, thoughts: str, answer: str) -> None:
    request = prepared(model)
    assert request.output_format is not None
    request = replace(request, output_format=replace(request.output_format, is_constrained=True))
    spelled = [token for character in answer for token in model.tokenizer.encode(character)]
    tokens = [*model.tokenizer.encode(thoughts), *spelled]
    for cuts in ([], list(range(len(tokens)))):
        found = said(request, tokens, cuts)
        assert (found["text"], found["reasoning"]) == (answer, "So." if thoughts else "")
        assert not found["warnings"] and not found["calls"]


def test_an_end_of_thoughts_that_had_not_begun_is_text_with_a_warning(model: ServedModel) -> None:
    spelled = [token for character in "Write </think> to end." for token in model.tokenizer.encode(character)]
    found = said(prepared(model), spelled, [])
    assert found["text"] == "Write </think> to end." and len(found["warnings"]) == 1


@pytest.mark.parametrize(
    ("tools", "text", "city"),
    [
        ("pythonic", r'[weather(city="Lyon \ud83d\ude00")]', "Lyon \U0001f600"),
        ("gemma", '```tool_code\nweather(city="Lyon \\ud83d\\ude00")\n```', "Lyon \U0001f600"),
        (
            "hermes",
            r'<tool_call>{"name": "weather", "arguments": "{\"city\": \"\\ud83d' + "\n" + r'\"}"}</tool_call>',
            "\ud83d\n",
        ),
    ],
)
def test_escapes_of_a_model_that_are_no_text_are_sent_as_escapes(model: ServedModel, tools: str, text: str, city: str) -> None:
    output_format = format_of(model.tokenizer, FormatNames(tools, "none"), SCHEMAS, "")
    params = common_pb2.SamplingParams(n=1, max_tokens=1000, seed=1)
    request = PreparedRequest("id", model, (1, 2), params, (), output_format=output_format)
    found = said(request, model.tokenizer.encode(text, add_special_tokens=False), [])
    assert [(call[1], json.loads(call[2])) for call in found["calls"]] == [("weather", {"city": city})]
