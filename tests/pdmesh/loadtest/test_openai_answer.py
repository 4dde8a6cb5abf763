"""What a server sends that is no answer is one request's error; the run goes on."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdmesh.loadtest.record import Outcome
from pdmesh.loadtest.runner import Runner, RunSettings
from pdmesh.loadtest.targets import openai
from pdmesh.loadtest.targets.openai import Chunk, OpenAiSettings, OpenAiTarget
from pdmesh.loadtest.targets.target import Done, TargetError
from pdmesh.loadtest.workload import Arrivals, Workload, plan

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
GOOD = b'data: {"choices": [{"text": "a"}], "usage": null}\n\ndata: [DONE]\n\n'
MALFORMED = {
    b'data: {"choices": ["a"]}\n\n': "choices[0] is not an object",
    b'data: {"choices": [null]}\n\n': "choices[0] is not an object",
    b'data: {"choices": {"0": {}}}\n\n': "choices is not a list",
    b'data: {"choices": [{"delta": "a"}]}\n\n': "choices[0].delta is not an object",
    b'data: {"choices": [{"delta": {"content": ["a"]}}]}\n\n': "choices[0].delta.content is not a text",
    b'data: {"choices": [{"text": 1}]}\n\n': "choices[0].text is not a text",
    b'data: {"usage": [1]}\n\n': "usage is not an object",
    b'data: {"usage": {"completion_tokens": "7"}}\n\n': "usage.completion_tokens is not a count",
    b'data: {"usage": {"prompt_tokens": -1}}\n\n': "usage.prompt_tokens is not a count",
    b'data: {"usage": {"prompt_tokens_details": 3}}\n\n': "usage.prompt_tokens_details is not an object",
    b"data: nonsense\n\n": "not a JSON object",
    b"data: [1]\n\n": "not a JSON object",
    b"data: " + b"[" * 100_000 + b"\n\n": "not a JSON object",
    b"data: \xff\xfe\n\n": "not a JSON object",
    b"data: " + b"a" * 10_000_000: "an event of more than 1 MiB",
    b"data: a\n" * 300_000: "an event of more than 1 MiB",
}
NAMES = st.sampled_from(
    [
        "choices",
        "delta",
        "text",
        "content",
        "reasoning_content",
        "usage",
        "prompt_tokens",
        "prompt_tokens_details",
        "error",
        "data",
    ]
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES | st.text(), inner, max_size=4),
)


@dataclass
class Misbehaving:
    """Answers /models, then each request with another of `answers`, in turn."""

    answers: list[bytes]
    num_asked: int = 0

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await reader.readuntil(b"\r\n\r\n")
            answer = self.answers[self.num_asked % len(self.answers)]
            self.num_asked += 1
            writer.write(HEAD + answer)
            await writer.drain()
        except ConnectionError:
            pass  # the load test leaves where an event is too large
        finally:
            writer.close()


@asynccontextmanager
async def serving(script: Misbehaving) -> AsyncIterator[str]:
    server = await asyncio.start_server(script, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
    finally:
        server.close()


async def test_a_run_goes_on_after_every_kind_of_malformed_answer() -> None:
    answers = [answer for bad in MALFORMED for answer in (bad, GOOD)]
    async with serving(Misbehaving(answers)) as url:
        target = OpenAiTarget(url, OpenAiSettings(model="m"))
        # One at a time, so that the answers come in turn.
        run = Runner(target, RunSettings())
        for session in plan(Workload(arrivals=Arrivals("constant", 1000.0)), 1, len(answers) / 1000):
            await run.run([session])
        await target.close()
    records = run.log.records
    assert len(records) == len(answers)
    assert [record.error for record in records[::2]] == [f"malformed answer: {what}" for what in MALFORMED.values()]
    assert all(record.outcome is Outcome.ERROR for record in records[::2])
    assert all(record.outcome is Outcome.OK for record in records[1::2])


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"data": 3}', "malformed answer: data is not a list"),
        (b"[]", "malformed answer: not a JSON object"),
        (b'{"data": [{"id": ["m"]}, 7, {}]}', "there are: none"),
        (b"x" * 3_000_000, "malformed answer: not a JSON object"),
    ],
)
async def test_a_list_of_models_that_is_none_is_a_target_error(body: bytes, message: str) -> None:
    async with serving(Misbehaving([body])) as url:
        target = OpenAiTarget(url, OpenAiSettings(model="m"))
        with pytest.raises(TargetError, match=message):
            await target.check()
        await target.close()


@given(JSON)
def test_whatever_comes_is_a_chunk_or_a_target_error(value: object) -> None:
    body = json.dumps(value).encode()
    for parse in (openai.read_chunk, openai.read_models):
        try:
            parse(body)
        except TargetError as error:
            assert error.outcome is Outcome.ERROR and error.message.isprintable()


@given(st.binary(max_size=300) | JSON.map(lambda value: json.dumps(value).encode()))
def test_a_message_is_one_line_that_a_terminal_can_show(body: bytes) -> None:
    shown = openai.read_message(body)
    assert len(shown) <= 200 and (not shown or shown.isprintable())
    shown.encode()


def test_what_a_chunk_holds() -> None:
    usage = {"prompt_tokens": 3, "completion_tokens": 7, "prompt_tokens_details": {"cached_tokens": 2}}
    reasoned = {"choices": [{"delta": {"content": None, "reasoning_content": "hm"}}], "usage": usage}
    assert openai.read_chunk(json.dumps(reasoned).encode()) == Chunk("hm", Done(3, 7, 2))
    assert openai.read_chunk(b'{"choices": [], "usage": null, "error": null}') == Chunk("", None)
