"""Content and events: however the router cuts an output into deltas, the whole message and the streamed one are the same."""

from __future__ import annotations

import json
from typing import Any

import pytest
from anthropic.lib.streaming._messages import accumulate_event
from anthropic.types import RawMessageStreamEvent
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from pdmesh.runtime.errors import InvalidArgument, ResourceExhausted
from pdmesh.v1 import common_pb2, mesh_pb2
from router.api.anthropic.content import input_of
from router.api.anthropic.requests import Call, parse_message
from router.api.anthropic.responses import PING, Answer, MessageEvent
from router.lifecycle.output import UNFINISHED, TokenChunk
from router.tokenization.prepared_request import FormatNames, OutputFormat, PreparedRequest, ServedModel, format_of, load
from tests.router import exact_types
from tests.router.mesh import write_model
from tests.router.test_output import Client

STOP, LENGTH = common_pb2.FINISH_REASON_STOP, common_pb2.FINISH_REASON_LENGTH
EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
SCHEMAS: dict[str, dict[str, Any]] = {name: {"type": "object"} for name in ("weather", "stop")}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    return load({"tiny": str(write_model(tmp_path_factory.mktemp("model")))})["tiny"]


def prepared(model: ServedModel, stop: tuple[str, ...] = ()) -> PreparedRequest:
    output_format = format_of(model.tokenizer, FormatNames("hermes", "think"), SCHEMAS, "")
    assert isinstance(output_format, OutputFormat)
    params = common_pb2.SamplingParams(n=1, max_tokens=1000, seed=1)
    return PreparedRequest("id", model, (1, 2), params, stop, output_format=output_format)


def responses(
    request: PreparedRequest, tokens: list[int], cuts: list[int], reason: common_pb2.FinishReason.ValueType
) -> list[mesh_pb2.GenerateResponse]:
    """What the router sends of an output that workers bring in pieces that end at `cuts`."""
    client = Client(request)
    ends = [*sorted({cut % len(tokens) for cut in cuts} - {0}), len(tokens)]
    for start, end in zip([0, *ends[:-1]], ends, strict=True):
        client.feed(TokenChunk(0, start, tokens[start:end], finish_reason=reason if end == len(tokens) else UNFINISHED))
    usage = mesh_pb2.Usage(prompt_tokens=2, completion_tokens=client.output.num_tokens, cached_tokens=1)
    return [
        mesh_pb2.GenerateResponse(started=mesh_pb2.Started(model="tiny", num_prompt_tokens=2)),
        *(mesh_pb2.GenerateResponse(delta=delta) for delta in client.deltas),
        mesh_pb2.GenerateResponse(completed=mesh_pb2.Completed(usage=usage)),
    ]


def call(**more: Any) -> Call:
    body = {"max_tokens": 1000, "messages": [{"role": "user", "content": "hi"}], **more}
    return parse_message(body, mesh_pb2.RequestOptions())


def whole(asked: Call, sent: list[mesh_pb2.GenerateResponse]) -> dict[str, Any]:
    answer = Answer(asked, "id")
    for response in sent:
        answer.add(0, response)
    return json.loads(json.dumps(answer.body()))  # type: ignore[no-any-return]


def events(asked: Call, sent: list[mesh_pb2.GenerateResponse]) -> list[dict[str, Any]]:
    answer = Answer(asked, "id")
    lines = [line for response in sent for line in answer.events(0, response)] + list(answer.last_events())
    shown = []
    for line in lines:
        kind, data = line.decode().removesuffix("\n\n").split("\n")
        shown.append(json.loads(data.removeprefix("data: ")))
        assert kind == f"event: {shown[-1]['type']}"
    return shown


def accumulated(shown: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that Anthropic's own client makes of events."""
    snapshot: Any = None
    buffers: dict[int, bytes] = {}
    for event in shown:
        snapshot = accumulate_event(event=EVENT.validate_python(event), current_snapshot=snapshot, json_bufs=buffers)
    return snapshot.model_dump(exclude_unset=True, exclude={"stop_details"})  # type: ignore[no-any-return]


def check_order(shown: list[dict[str, Any]]) -> None:
    """Blocks follow each other, each with its own kinds of deltas, between the beginning and the end of the message."""
    kinds = [event["type"] for event in shown]
    assert kinds[0] == "message_start" and kinds[-2:] == ["message_delta", "message_stop"]
    begun, open_kind, signed = -1, None, False
    for event in shown[1:-2]:
        if event["type"] == "content_block_start":
            assert open_kind is None and event["index"] == begun + 1
            begun, open_kind, signed = event["index"], event["content_block"]["type"], False
        elif event["type"] == "content_block_delta":
            allowed = {
                "thinking": ("thinking_delta", "signature_delta"), "text": ("text_delta",), "tool_use": ("input_json_delta",),
            }[open_kind or ""]  # fmt: skip
            assert event["index"] == begun and event["delta"]["type"] in allowed and not signed
            signed = event["delta"]["type"] == "signature_delta"
        else:
            assert event["type"] == "content_block_stop" and event["index"] == begun and signed == (open_kind == "thinking")
            open_kind = None
    assert open_kind is None


def weather(**arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': 'weather', 'arguments': arguments}, ensure_ascii=False)}\n</tool_call>"


OUTPUTS = [
    f"<think>Let me see.</think>\n\nI ask. {weather(city='Köln', days=[1, 2.5])} Then {weather()} and that is all.",
    f"{weather(city='Łódź')}{weather(city='Lyon', more={'a': None, 'b': True})}",
    "<think>Only thoughts",
    'No call: <tool_call>\n{"nom": 1}\n</tool_call> but text.',
    "Text 😀 alone",
    '<tool_call>\n{"name": "stop"}\n</tool_call>',
]
CUTS = st.lists(st.integers(0, 1000), max_size=60)


@settings(max_examples=150, deadline=None)
@given(output=st.sampled_from(OUTPUTS), size=st.integers(1, 400), first=CUTS, second=CUTS, hides=st.booleans())
def test_whole_and_streamed_are_the_same_in_every_cut(
    model: ServedModel, output: str, size: int, first: list[int], second: list[int], hides: bool
) -> None:
    tokens = model.tokenizer.encode(output)[:size]
    reason = STOP if size >= len(tokens) else LENGTH
    asked = call(thinking={"type": "adaptive", "display": "omitted" if hides else "summarized"})
    sent = [responses(prepared(model), tokens, cuts, reason) for cuts in (first, second)]
    shown = events(asked, sent[1])
    check_order(shown)
    assert whole(asked, sent[0]) == accumulated(shown)


def test_blocks_stand_in_the_order_in_which_the_model_wrote_them(model: ServedModel) -> None:
    tokens = model.tokenizer.encode(OUTPUTS[0])
    for cuts in ([], list(range(len(tokens)))):
        message = whole(call(), responses(prepared(model), tokens, cuts, STOP))
        kinds = [block["type"] for block in message["content"]]
        assert kinds == ["thinking", "text", "tool_use", "text", "tool_use", "text"]
        assert message["content"][0] == {"type": "thinking", "thinking": "Let me see.", "signature": ""}
        assert [block["text"].strip() for block in message["content"][1::2]] == ["I ask.", "Then", "and that is all."]
        assert [block["input"] for block in message["content"][2::2]] == [{"city": "Köln", "days": [1, 2.5]}, {}]
        assert all(block["id"].startswith("toolu_") for block in message["content"][2::2])
        assert message["stop_reason"] == "tool_use"
        usage = {"input_tokens": 1, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 1, "output_tokens": len(tokens)}
        assert message["usage"] == usage


def test_a_stop_sequence_is_named_unless_there_are_calls_to_make(model: ServedModel) -> None:
    for output, named in (("One two three", ("stop_sequence", " two")), (f"{weather()} two", ("tool_use", None))):
        request = prepared(model, stop=(" two",))
        message = whole(call(stop_sequences=[" two"]), responses(request, model.tokenizer.encode(output), [], STOP))
        assert (message["stop_reason"], message["stop_sequence"]) == named
    ended = responses(prepared(model), [*model.tokenizer.encode("One"), 258], [], STOP)
    assert ended[1].delta.stop_reason  # the token's text, which is no stop sequence
    assert whole(call(), ended)["stop_reason"] == "end_turn"


def test_an_output_that_fills_the_context_says_so(model: ServedModel) -> None:
    tokens = model.tokenizer.encode("abc")
    sent = responses(prepared(model), tokens, [], LENGTH)
    assert whole(call(max_tokens=3), sent)["stop_reason"] == "max_tokens"
    assert whole(call(max_tokens=32_000), sent)["stop_reason"] == "model_context_window_exceeded"


def test_an_output_without_text_has_no_blocks(model: ServedModel) -> None:
    sent = responses(prepared(model), [258], [], STOP)
    assert whole(call(), sent)["content"] == []
    assert [event["type"] for event in events(call(), sent)] == ["message_start", "message_delta", "message_stop"]


def test_ids_of_the_model_are_kept(model: ServedModel) -> None:
    delta = mesh_pb2.Delta(tool_calls=[mesh_pb2.ToolCallDelta(index=0, id="functions.weather:0", name="weather")])
    answer = Answer(call(), "id")
    answer.add(0, mesh_pb2.GenerateResponse(delta=delta))
    assert answer.body()["content"] == [{"type": "tool_use", "id": "functions.weather:0", "name": "weather", "input": {}}]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("", {}),
        ("{", {}),
        ('{"city": "Ly', {}),
        ('{"city": "Lyon", "days": [1, 2', {"city": "Lyon", "days": [1, 2]}),
        ('{"a": {"b": "c"}, "d"', {"a": {"b": "c"}}),
        ('{"a": 1e999}', {"a": 1.7976931348623157e308}),
        ('{"a": 12345678901234567890123}', {"a": 12345678901234567890123}),
        ('{"a": "\\ud800"}', {"a": "\ud800"}),
        ("nonsense", {}),
        ("[1]", {}),
    ],
)
def test_the_input_of_a_call_holds_what_had_come_whole(text: str, value: Any) -> None:
    assert input_of(text) == value


def test_events_have_the_types_that_openapi_shows(model: ServedModel) -> None:
    tokens = model.tokenizer.encode(OUTPUTS[0])
    shown = events(call(), responses(prepared(model), tokens, [5, 30, 60], STOP))
    errors = (ResourceExhausted("too slow"), InvalidArgument("thread", "thread: is not kept"))
    failed = [Answer(call(), "id").error_event(error) for error in errors]
    lines = [line.decode().split("\n")[1].removeprefix("data: ") for line in (PING, *failed)]
    exact_types.check(MessageEvent, [*shown, *map(json.loads, lines)])
    assert {event["delta"]["type"] for event in shown if event["type"] == "content_block_delta"} == {
        "thinking_delta", "signature_delta", "text_delta", "input_json_delta",
    }  # fmt: skip
