"""However an output is cut into deltas, the response is the same; and the events of a stream build that response."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from pdmesh.runtime.errors import ResourceExhausted
from pdmesh.v1 import common_pb2, mesh_pb2
from router.api.responses.answer import Answer, Identity, ServedModels
from router.api.responses.output import Output
from router.api.responses.requests import parse
from router.api.responses.schema import ResponseEvent
from router.lifecycle.output import UNFINISHED, TokenChunk
from router.tokenization.prepared_request import FormatNames, PreparedRequest, ServedModel, format_of, load
from tests.router import exact_types
from tests.router.mesh import write_model
from tests.router.test_output import Client

EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
STOP, LENGTH = common_pb2.FINISH_REASON_STOP, common_pb2.FINISH_REASON_LENGTH
SCHEMAS: dict[str, dict[str, Any]] = {"weather": {"type": "object", "properties": {"city": {"type": "string"}}}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Łódź"}}\n</tool_call>'
SEGMENTS = (
    "It is sunny in Köln.",
    CALL,
    CALL.replace("Łódź", "Nice"),
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Ly" oops}}\n</tool_call>',
    "<tool_call>nothing</tool_call>",
    "\n\n",
    " Then 🙂 more.",
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    return load({"tiny": str(write_model(tmp_path_factory.mktemp("tiny")))})["tiny"]


def deltas_of(
    model: ServedModel,
    tokens: list[int],
    ends: list[int],
    reason: common_pb2.FinishReason.ValueType,
    *,
    has_logprobs: bool = False,
) -> list[mesh_pb2.GenerateResponse]:
    """What a router makes of tokens that come in groups, which end where `ends` says."""
    output_format = format_of(model.tokenizer, FormatNames("hermes", "think"), SCHEMAS, "", max_calls=None)
    params = common_pb2.SamplingParams(n=1, max_tokens=1000, seed=1, logprobs=0)
    client = Client(PreparedRequest("id", model, (1, 2), params, (), output_format=output_format))
    for start, end in zip([0, *ends[:-1]], ends, strict=True):
        told = tokens[start:end] if has_logprobs else []
        logprobs = [common_pb2.Logprobs(chosen=common_pb2.TokenLogprob(token_id=token)) for token in told]
        finish_reason = reason if end == len(tokens) else UNFINISHED
        client.feed(TokenChunk(0, start, tokens[start:end], logprobs, finish_reason))
    return [mesh_pb2.GenerateResponse(delta=delta) for delta in client.deltas]


def answer_of(model: ServedModel, **asked: Any) -> Answer:
    call = parse({"model": "tiny", "input": "hello", "stream": True, **asked}, mesh_pb2.RequestOptions())
    models = ServedModels(lambda name: {}, lambda name, token_id: model.tokenizer.single_token_bytes(token_id))
    return Answer(call, Identity("0" * 24, 1), models, lambda: 2.0, is_kept=False)


def run(answer: Answer, deltas: list[mesh_pb2.GenerateResponse], num_tokens: int) -> list[dict[str, Any]]:
    """All events of a stream, parsed."""
    started = mesh_pb2.GenerateResponse(started=mesh_pb2.Started(model="tiny", num_prompt_tokens=2, request_id="id"))
    usage = mesh_pb2.Usage(prompt_tokens=2, completion_tokens=num_tokens)
    completed = mesh_pb2.GenerateResponse(completed=mesh_pb2.Completed(usage=usage))
    sent = [event for message in (started, *deltas, completed) for event in answer.events(0, message)]
    events = []
    for event in [*sent, *answer.last_events()]:
        name, data = event.decode().removesuffix("\n\n").split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def built(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The items that a client builds of the pieces alone; one is open at a time."""
    items: list[dict[str, Any]] = []
    open_index = None
    for event in events:
        kind = event["type"].removeprefix("response.")
        if kind == "output_item.added":
            assert open_index is None and event["output_index"] == len(items) and event["item"]["status"] == "in_progress"
            open_index = len(items)
            items.append(event["item"])
        elif open_index is not None:
            assert (event["output_index"], event.get("item_id", items[-1]["id"])) == (open_index, items[-1]["id"])
            if kind == "output_item.done":
                assert {**event["item"], "status": ""} == {**items[-1], "status": ""}
                items[-1]["status"], open_index = event["item"]["status"], None
            else:
                _grow(items[-1], kind, event)
    assert open_index is None
    return items


def _grow(item: dict[str, Any], kind: str, event: dict[str, Any]) -> None:
    if kind == "content_part.added":
        item["content"].append(event["part"])
    elif kind == "function_call_arguments.delta":
        item["arguments"] += event["delta"]
    elif kind == "function_call_arguments.done":
        assert event["arguments"] == item["arguments"]
    elif kind in ("output_text.delta", "reasoning_text.delta"):
        item["content"][0]["text"] += event["delta"]
        item["content"][0].get("logprobs", []).extend(event.get("logprobs", []))
    elif kind in ("output_text.done", "reasoning_text.done"):
        assert event["text"] == item["content"][0]["text"]
        if "logprobs" in event:  # with those behind the text
            item["content"][0]["logprobs"] = event["logprobs"]
    else:
        assert (kind, event["part"]) == ("content_part.done", item["content"][0])


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_every_cut_gives_the_same_response(model: ServedModel, data: st.DataObject) -> None:
    segments = data.draw(st.lists(st.sampled_from(SEGMENTS), max_size=5))
    thought = data.draw(st.sampled_from(["", "<think>Hm, Łódź.</think>", "<think>Hm.</think>\n\n"]))
    tokens = model.tokenizer.encode(thought + "".join(segments) or " ", add_special_tokens=False)
    reason = data.draw(st.sampled_from([STOP, LENGTH]))
    single = list(range(1, len(tokens) + 1))
    has_logprobs = "<tool" not in "".join(segments)  # which tokens of a delta are a call's is not known
    wanted = answer_of(model)
    events = run(wanted, deltas_of(model, tokens, single, reason, has_logprobs=has_logprobs), len(tokens))
    assert events[-1]["response"] == wanted.body() and built(events) == wanted.body()["output"]
    Response.model_validate(wanted.body())
    cuts = data.draw(st.sets(st.sampled_from(single)))
    groups = deltas_of(model, tokens, sorted(cuts | {len(tokens)}), reason, has_logprobs=has_logprobs)
    streamed = answer_of(model)
    assert built(run(streamed, groups, len(tokens))) == wanted.body()["output"]
    whole = answer_of(model)
    for message in groups:
        whole.add(0, message)
    for name in ("output", "status", "incomplete_details", "warnings"):
        assert streamed.body().get(name) == whole.body().get(name) == wanted.body().get(name), name
    assert streamed.body()["usage"] == wanted.body()["usage"]


def test_reasoning_text_calls_and_what_follows_are_items_in_that_order(model: ServedModel) -> None:
    tokens = model.tokenizer.encode(f"<think>Hm.</think>I look. {CALL} Wait. {CALL}", add_special_tokens=False)
    answer = answer_of(model, include=["message.output_text.logprobs"])
    events = run(answer, deltas_of(model, tokens, [len(tokens)], STOP), len(tokens))
    output: Any = answer.body()["output"]
    for event in events:
        EVENTS.validate_python(event)
    assert [item["type"] for item in output] == ["reasoning", "message", "function_call", "message", "function_call"]
    assert output[0]["content"][0]["text"] == "Hm." and output[1]["content"][0]["text"] == "I look."
    assert [item["arguments"] for item in output if item["type"] == "function_call"] == ['{"city": "Łódź"}'] * 2
    assert len({item["id"] for item in output}) == 5
    usage: Any = answer.body()["usage"]
    assert usage["output_tokens_details"] == {"reasoning_tokens": len(model.tokenizer.encode("<think>Hm.</think>"))}


def test_text_has_the_log_probabilities_of_its_tokens_and_reasoning_none(model: ServedModel) -> None:
    tokens = model.tokenizer.encode("<think>Hm.</think>Köln 🙂", add_special_tokens=False)
    answer = answer_of(model, top_logprobs=1)
    run(answer, deltas_of(model, tokens, list(range(1, len(tokens) + 1)), STOP, has_logprobs=True), len(tokens))
    output: Any = answer.body()["output"]
    entries = output[1]["content"][0]["logprobs"]
    assert bytes(byte for entry in entries for byte in entry["bytes"]).decode() == "Köln 🙂"


@pytest.mark.parametrize("reason", [STOP, LENGTH])
def test_an_output_without_text_is_an_empty_message(model: ServedModel, reason: common_pb2.FinishReason.ValueType) -> None:
    answer = answer_of(model)
    run(answer, [mesh_pb2.GenerateResponse(delta=mesh_pb2.Delta(finish_reason=reason))], 0)
    output: Any = answer.body()["output"]
    assert [(item["type"], item["content"][0]["text"]) for item in output] == [("message", "")]
    assert answer.body()["status"] == output[0]["status"] == ("completed" if reason == STOP else "incomplete")


def test_padding_hides_the_length_of_a_delta(model: ServedModel) -> None:
    tokens = model.tokenizer.encode("It is sunny in Köln.", add_special_tokens=False)
    answer = answer_of(model, stream_options={"include_obfuscation": True})
    events = run(answer, deltas_of(model, tokens, [3, 4, len(tokens)], STOP), len(tokens))
    deltas = [event for event in events if "delta" in event]
    assert len(deltas) == 3
    assert {len(json.dumps(event["delta"])) + len(event["obfuscation"]) for event in deltas} == {32}
    assert not any("obfuscation" in event for event in run(answer_of(model), deltas_of(model, tokens, [len(tokens)], STOP), 1))


def test_events_have_the_types_that_openapi_shows(model: ServedModel) -> None:
    tool = {"type": "function", "name": "weather", "parameters": {"type": "object"}}
    named = {"type": "function", "name": "weather"}
    asked: dict[str, Any] = {
        "tools": [tool],
        "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [named]},
        "text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}}},
        "metadata": {"a": "b"},
        "include": ["message.output_text.logprobs"],
        "stream_options": {"include_obfuscation": True},
    }
    tokens = model.tokenizer.encode(f"<think>Hm.</think>I look. {CALL} Wait.", add_special_tokens=False)
    seen = []
    for reason, choice in ((STOP, asked["tool_choice"]), (LENGTH, named)):
        answer = answer_of(model, **{**asked, "tool_choice": choice})
        seen += run(answer, deltas_of(model, tokens, [9, 30, len(tokens)], reason, has_logprobs=True), len(tokens))
    lines = answer.error_event(ResourceExhausted("too slow")).decode().split("\n")
    exact_types.check(ResponseEvent, [*seen, *(json.loads(line[6:]) for line in lines if line.startswith("data: "))])


def test_text_before_a_thought_keeps_the_log_probabilities_of_its_tokens() -> None:
    told = [common_pb2.Logprobs(chosen=common_pb2.TokenLogprob(text=text)) for text in ("I ", "look", "Hm", ".", "So", "!")]
    output = Output("x", lambda entries: [{"token": entry.chosen.text} for entry in entries], {})
    parts = [mesh_pb2.DeltaPart(text_chars=6), mesh_pb2.DeltaPart(reasoning_chars=3), mesh_pb2.DeltaPart(text_chars=3)]
    delta = mesh_pb2.Delta(text="I lookSo!", reasoning="Hm.", logprobs=told, num_reasoning_tokens=2, parts=parts)
    list(output.take(delta))
    list(output.end(is_complete=True))
    items: Any = output.items()
    assert [item["type"] for item in items] == ["message", "reasoning", "message"]
    shown = [[entry["token"] for entry in item["content"][0]["logprobs"]] for item in items if item["type"] == "message"]
    assert shown == [["I ", "look"], ["So", "!"]]
