"""From tokens to calls and reasoning: however tokens are grouped, and wherever a stream is resumed, the pieces are the same."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer

from pdmesh.v1 import common_pb2, mesh_pb2
from router.lifecycle.output import UNFINISHED, TokenChunk
from router.tokenization.prepared_request import FormatNames, PreparedRequest, ServedModel, format_of, load
from tests.router.mesh import write_model
from tests.router.test_output import Client

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
