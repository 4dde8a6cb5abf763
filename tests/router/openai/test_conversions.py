"""The pure parts, and what no client of openai's would send: arbitrary JSON gives a call or names a field, never a surprise."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Sequence
from typing import Any

import grpc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdmesh.runtime.errors import InvalidArgument, MeshError, ResourceExhausted, Unavailable
from pdmesh.v1 import common_pb2, mesh_pb2
from router.api.http.body import LARGE_BODY_BYTES, parse_json, parsed
from router.api.http.errors import HttpError, answer_to, renamed
from router.api.http.reports import LOWEST_LOGPROB
from router.api.openai import requests as openai_requests
from router.api.openai.bodies import MAX_TOKEN_IDS
from router.api.openai.responses import Answer, Call, ChatShape, TextShape

LENGTH = common_pb2.FINISH_REASON_LENGTH
OPTIONS = mesh_pb2.RequestOptions(request_id="r")
HELLO: Any = [{"role": "user", "content": "hello"}]
KNOWN = st.sampled_from(
    [
        "model", "messages", "prompt", "max_tokens", "max_completion_tokens", "temperature", "top_p", "n", "seed", "stop",
        "stream", "stream_options", "logprobs", "top_logprobs", "response_format", "structured_outputs", "guided_json",
        "guided_choice",
        "echo", "best_of", "tools", "logit_bias", "stop_token_ids", "cache_salt", "role", "content", "type", "text",
        "json_schema", "schema", "include_usage", "function", "name", "parameters", "tool_choice", "tool_calls", "tool_call_id",
        "arguments", "chat_template_kwargs", "reasoning_effort", "parallel_tool_calls", "strict",
    ]
)  # fmt: skip
LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.just("\ud800")
    | st.sampled_from(["text", "function", "tool", "assistant", "{}"])
)
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KNOWN, inner, max_size=4), max_leaves=12
)


@settings(max_examples=150, deadline=None)
@given(st.dictionaries(KNOWN, VALUES, max_size=6), st.booleans())
def test_any_json_is_a_call_or_names_a_field(body: dict[str, Any], chat: bool) -> None:
    parse = openai_requests.parse_chat if chat else openai_requests.parse_completion
    good: dict[str, Any] = {"messages": HELLO} if chat else {"prompt": "a"}
    try:
        call = parse({**good, **body}, OPTIONS)
    except InvalidArgument as error:
        assert error.field and error.message.startswith(f"{error.field}: ") and len(error.message) < 2000
        json.dumps(answer_to(error).body, allow_nan=False).encode()
    else:
        assert all(request.SerializeToString() for request in call.requests)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=40) | st.text(alphabet='{}[]",:0123456789aeE.-\\u', max_size=40).map(str.encode))
def test_any_bytes_are_an_object_or_a_400(content: bytes) -> None:
    try:
        assert isinstance(parse_json(content), dict)
    except HttpError as error:
        assert error.status == 400 and "body" in error.message


@pytest.mark.parametrize(
    ("asked", "wanted"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, common_pb2.Constraint(json_schema='{"type":"object"}')),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"b": 1, "a": True}}}},
            common_pb2.Constraint(json_schema='{"b":1,"a":true}'),
        ),
        ({"guided_json": {"type": "null"}}, common_pb2.Constraint(json_schema='{"type":"null"}')),
        ({"guided_json": '{"type": "null"}'}, common_pb2.Constraint(json_schema='{"type": "null"}')),
        ({"guided_regex": "[ab]+"}, common_pb2.Constraint(regex="[ab]+")),
        ({"guided_grammar": 'start: "a"'}, common_pb2.Constraint(grammar='start: "a"')),
        ({"guided_choice": ["a", "b"]}, common_pb2.Constraint(choice=common_pb2.Alternatives(values=["a", "b"]))),
        ({"structured_outputs": {"choice": ["a"]}}, common_pb2.Constraint(choice=common_pb2.Alternatives(values=["a"]))),
        ({"structured_outputs": {"json_object": True}}, common_pb2.Constraint(json_schema='{"type":"object"}')),
        ({"structured_outputs": {"json": {}}}, common_pb2.Constraint(json_schema="{}")),
    ],
)
def test_constraints(asked: dict[str, Any], wanted: common_pb2.Constraint | None) -> None:
    (request,) = openai_requests.parse_chat({"messages": HELLO, **asked}, OPTIONS).requests
    assert request.sampling.HasField("constraint") == (wanted is not None)
    assert wanted is None or request.sampling.constraint == wanted


def test_a_refused_constraint_is_named_as_it_was_asked_for() -> None:
    call = openai_requests.parse_chat({"messages": HELLO, "guided_regex": "("}, OPTIONS)
    error = renamed(InvalidArgument("sampling.constraint.regex", "sampling.constraint.regex: does not end"), call.names)
    assert (error.field, error.message) == ("guided_regex", "guided_regex: does not end")
    assert renamed(InvalidArgument("sampling.constraint", "too large"), call.names).field == "guided_regex"


@pytest.mark.parametrize(
    ("error", "status", "retry"),
    [
        (InvalidArgument("a", "a: no"), 400, None),
        (ResourceExhausted("full", retry_delay_s=2.2), 429, "3"),
        (Unavailable("going"), 503, "1"),
        (MeshError("late", code=grpc.StatusCode.DEADLINE_EXCEEDED), 504, None),
        (MeshError("bug", code=grpc.StatusCode.DATA_LOSS), 500, None),
    ],
)
def test_statuses(error: MeshError, status: int, retry: str | None) -> None:
    answer = answer_to(renamed(error, {}))
    assert (answer.status, answer.headers.get("retry-after")) == (status, retry)
    assert set(answer.body["error"]) == {"message", "type", "param", "code"}  # type: ignore[call-overload]


def _entry(text: str, logprob: float, *top: tuple[str, float], token_ids: Sequence[int] = range(100)) -> common_pb2.Logprobs:
    tokens = [
        common_pb2.TokenLogprob(token_id=token_id, text=one, logprob=value)
        for token_id, (one, value) in zip(token_ids, ((text, logprob), *top), strict=False)
    ]
    return common_pb2.Logprobs(chosen=tokens[0], top=tokens[1:])


PARTS = {7: b"\xf0\x9f", 8: b" \xf0\x9f", 9: b"\x98\x80"}
"""Tokens that are only part of a character."""


def _bytes_of(token: common_pb2.TokenLogprob) -> bytes:
    return PARTS.get(token.token_id, token.text.encode())


def test_logprobs_that_json_cannot_say_and_tokens_that_are_no_text() -> None:
    entries = [
        _entry("é", -0.5, ("\ufffd", -1.0), token_ids=[1, 8]),
        _entry("\ufffd", -math.inf, token_ids=[7]),
        _entry("", math.nan, token_ids=[400]),
    ]
    shown: Any = ChatShape().logprobs(entries, [0, 1, 2], _bytes_of)["content"]
    assert [entry["logprob"] for entry in shown] == [-0.5, LOWEST_LOGPROB, LOWEST_LOGPROB]
    assert [entry["bytes"] for entry in shown] == [[0xC3, 0xA9], [0xF0, 0x9F], None]
    assert shown[0]["top_logprobs"] == [{"token": "\ufffd", "logprob": -1.0, "bytes": [0x20, 0xF0, 0x9F]}]


def test_alternatives_of_completions_hold_the_chosen_token_too_each_under_a_name_of_its_own() -> None:
    top = [("b", -0.5), ("\ufffd", -1.0), ("\ufffd", -2.0), ("a", -4.0), ("\ufffd", -5.0)]
    entry = _entry("a", -3.0, *top, token_ids=[1, 2, 7, 8, 5, 6])
    shown = TextShape().logprobs([entry], [7], _bytes_of)
    assert shown["text_offset"] == [7] and shown["tokens"] == ["a"]
    assert shown["top_logprobs"] == [
        {"a": -3.0, "b": -0.5, r"bytes:\xf0\x9f": -1.0, r"bytes: \xf0\x9f": -2.0, "token_id:5": -4.0, "\ufffd": -5.0}
    ]
    chosen = TextShape().logprobs([_entry("\ufffd", -0.5, ("\ufffd", -0.5), token_ids=[7, 7])], [0], _bytes_of)
    assert chosen["tokens"] == [r"bytes:\xf0\x9f"] and chosen["top_logprobs"] == [{r"bytes:\xf0\x9f": -0.5}]
    assert TextShape().logprobs([_entry("a", -3.0)], [0], _bytes_of)["top_logprobs"] is None


def _answer(call: Call, echo: str = "") -> Answer:
    return Answer(call, "r", 1, lambda number, model: echo, lambda model, token_id: PARTS[token_id])


def test_text_offsets_go_on_over_chunks_and_count_the_echo() -> None:
    call = openai_requests.parse_completion({"prompt": "xy", "stream": True}, OPTIONS)
    answer = _answer(call, echo="xy")
    offsets = []
    for text, entries in (
        ("abc", [_entry("a", -1.0), _entry("bc", -1.0)]),
        ("", [_entry("\ufffd", -1.0, token_ids=[7])]),
        ("😀e", [_entry("\ufffd", -1.0, token_ids=[9]), _entry("e", -1.0)]),
    ):
        delta = mesh_pb2.Delta(text=text, token_ids=[1] * len(entries), logprobs=entries)
        chunk: Any = answer.chunk(0, mesh_pb2.GenerateResponse(delta=delta))
        offsets += chunk["choices"][0]["logprobs"]["text_offset"]
    assert offsets == [2, 3, 5, 5, 6]  # a token within a character is where the character is


PROMPT_ENTRIES = [_entry("x", math.nan), _entry("yz", -2.0, ("a", -0.25), ("b", -0.5))]


def _first_delta(text: str = "c") -> mesh_pb2.GenerateResponse:
    delta = mesh_pb2.Delta(
        text=text, token_ids=[5], logprobs=[_entry(text, -1.0)], prompt_logprobs=PROMPT_ENTRIES, finish_reason=LENGTH
    )
    return mesh_pb2.GenerateResponse(delta=delta)


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("max_tokens", [0, 1])
def test_an_echo_has_the_log_probabilities_of_the_prompt(streamed: bool, max_tokens: int) -> None:
    asked = {"prompt": "xyz", "echo": True, "logprobs": 1, "max_tokens": max_tokens, "stream": streamed}
    call = openai_requests.parse_completion(asked, OPTIONS)
    assert [(request.sampling.prompt_logprobs, request.sampling.max_tokens) for request in call.requests] == [(1, 1)]
    answer = _answer(call, echo="xyz")
    if streamed:
        chunk: Any = answer.chunk(0, _first_delta())
        choice, usage = chunk["choices"][0], answer.usage()
    else:
        answer.add(0, _first_delta())
        whole: Any = answer.body()
        choice, usage = whole["choices"][0], whole["usage"]
    shown = choice["logprobs"]
    assert choice["text"] == "xyz" + "c" * max_tokens and choice["finish_reason"] == "length"
    assert shown["tokens"] == ["x", "yz", *["c"] * max_tokens] and shown["text_offset"] == [0, 1, 3][: 2 + max_tokens]
    assert shown["token_logprobs"] == [None, -2.0, -1.0][: 2 + max_tokens]
    assert shown["top_logprobs"][:2] == [None, {"yz": -2.0, "a": -0.25}]
    assert usage["completion_tokens"] == max_tokens


def test_a_special_token_before_the_text_has_no_place_in_the_echo() -> None:
    call = openai_requests.parse_completion({"prompt": "yz", "echo": True, "logprobs": 0}, OPTIONS)
    answer = _answer(call, echo="yz")
    answer.add(0, _first_delta())
    whole: Any = answer.body()
    assert whole["choices"][0]["logprobs"]["text_offset"] == [0, 0, 2]


@pytest.mark.parametrize("chat", [False, True])
def test_log_probabilities_of_a_prompt_have_vllms_form(chat: bool) -> None:
    parse = openai_requests.parse_chat if chat else openai_requests.parse_completion
    prompt: dict[str, Any] = {"messages": HELLO} if chat else {"prompt": "xyz"}
    answer = _answer(parse({**prompt, "prompt_logprobs": 1}, OPTIONS))
    answer.add(0, _first_delta())
    whole: Any = answer.body()
    expected = [
        None,
        {
            "0": {"logprob": -2.0, "rank": None, "decoded_token": "yz"},
            "1": {"logprob": -0.25, "rank": 1, "decoded_token": "a"},
        },
    ]
    assert (whole if chat else whole["choices"][0])["prompt_logprobs"] == expected
    with pytest.raises(InvalidArgument) as refused:
        parse({**prompt, "prompt_logprobs": 1, "stream": True}, OPTIONS)
    assert refused.value.field == "prompt_logprobs"


def test_no_output_at_all_is_for_what_shows_the_prompt() -> None:
    with pytest.raises(InvalidArgument) as refused:
        openai_requests.parse_completion({"prompt": "a", "max_tokens": 0}, OPTIONS)
    assert refused.value.field == "max_tokens"


def test_ids_without_text_make_no_chunk_but_the_first() -> None:
    call = openai_requests.parse_chat({"messages": HELLO, "stream": True}, OPTIONS)
    answer = _answer(call)
    half = mesh_pb2.GenerateResponse(delta=mesh_pb2.Delta(token_ids=[1]))
    chunks: list[Any] = [answer.chunk(0, half), answer.chunk(0, half)]
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""} and chunks[1] is None
    assert answer.usage()["completion_tokens"] == 2


def test_request_ids_of_many_prompts_stay_within_their_length() -> None:
    long = mesh_pb2.RequestOptions(request_id="x" * 64)
    requests = openai_requests.parse_completion({"prompt": ["a"] * 101}, long).requests
    names = {request.options.request_id for request in requests}
    assert len(names) == 101 and {len(name) for name in names} == {64}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": [1] * (MAX_TOKEN_IDS + 1)}, "prompt"),
        ({"prompt": [[1] * 9000] * 128}, "prompt"),
        ({"prompt": ["a" * 20_000] * 128}, "prompt"),
        ({"prompt": [1, 2, "3"]}, "prompt[2]"),
        ({"prompt": [1, True]}, "prompt[1]"),
        ({"prompt": [[1], [2, -1]]}, "prompt[1][1]"),
        ({"prompt": [1, 2**32]}, "prompt[1]"),
        ({"messages": [*HELLO] * 10_001}, "messages"),
    ],
)
def test_what_is_too_much_is_refused_before_it_is_looked_at(body: dict[str, Any], param: str) -> None:
    parse = openai_requests.parse_chat if "messages" in body else openai_requests.parse_completion
    with pytest.raises(InvalidArgument) as refused:
        parse(body, OPTIONS)
    assert refused.value.field == param


async def test_a_large_body_is_read_in_a_thread_as_a_small_one_is(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[threading.Thread] = []

    def parse(body: dict[str, Any]) -> Call:
        seen.append(threading.current_thread())
        return openai_requests.parse_completion(body, OPTIONS)

    for size in (10, LARGE_BODY_BYTES):
        call = await parsed(parse, json.dumps({"prompt": "a" * size}).encode())
        assert [len(request.text) for request in call.requests if isinstance(request, mesh_pb2.GenerateRequest)] == [size]
        with pytest.raises(HttpError):
            await parsed(parse, b"[" * size)
    assert [thread is threading.current_thread() for thread in seen] == [True, False]


def test_the_ends_of_openais_ranges_are_greedy_and_the_likeliest_token() -> None:
    call = openai_requests.parse_completion({"prompt": "a", "temperature": 1e-8, "top_p": 0}, OPTIONS)
    sampling = call.requests[0].sampling
    assert sampling.temperature == 0
    assert 0 < sampling.top_p < 1e-5
