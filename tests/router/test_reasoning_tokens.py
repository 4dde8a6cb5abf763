"""Tokens of reasoning: deltas and usage count the same ones, in every cut of every format, and so does another reading."""

from __future__ import annotations

import random
import re
import sys
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from pdmesh.text.detokenizer import ChoiceText, VisibleMarks
from pdmesh.text.parsers.events import Message
from pdmesh.text.parsers.registry import REASONING_FORMATS, TOOL_FORMATS, make_parser
from pdmesh.v1 import common_pb2, mesh_pb2
from router.lifecycle.output import UNFINISHED, TokenChunk
from router.lifecycle.parsed_text import ReasoningTokens
from router.tokenization.prepared_request import FormatNames, OutputFormat, PreparedRequest, ServedModel, format_of, load
from tests.router.mesh import write_model
from tests.router.test_output import Client
from tests.router.test_parsed_output import write_marked_model
from tests.text.parsers import recorded
from tests.text.parsers.recorded import Shape

STOP = common_pb2.FINISH_REASON_STOP
HARMONY_THOUGHT = re.compile(
    r"(?:<\|start\|>\s*assistant\s*)?<\|channel\|>\s*analysis\s*<\|message\|>"
    r"(?:(?!<\|(?:start|end|return|call)\|>).)*(?:<\|(?:end|return|call)\|>|(?=<\|start\|>)|\Z)",
    re.DOTALL,
)
IS_SPELLED = pytest.mark.parametrize("is_spelled", [True, False], ids=["spelled", "special"])


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, ServedModel]:
    """By whether marks are spelled with several tokens, or are tokens of their own."""
    spelled, special = tmp_path_factory.mktemp("spelled"), tmp_path_factory.mktemp("special")
    folders: dict[bool, Path] = {True: write_model(spelled), False: write_marked_model(special)}
    return {is_spelled: load({"tiny": str(folder)})["tiny"] for is_spelled, folder in folders.items()}


def prepared(model: ServedModel, shape: Shape, *, stop: tuple[str, ...] = (), n: int = 1) -> PreparedRequest:
    output_format = format_of(model.tokenizer, FormatNames(shape.tools, shape.reasoning), recorded.SCHEMAS, "")
    assert output_format is not None
    params = common_pb2.SamplingParams(n=n, max_tokens=5000, seed=1)
    formed = replace(output_format, has_begun=shape.has_begun)
    return PreparedRequest("id", model, (1, 2), params, stop, output_format=formed)


def thoughts_in(text: str, shape: Shape) -> list[tuple[int, int]]:
    """Where thoughts stand, marks included, read with regular expressions; those that are cut off have no end."""
    form = TOOL_FORMATS[shape.tools]
    if form.thoughts is not None:
        found = [match.span() for match in HARMONY_THOUGHT.finditer(text)]
        return [(begin, end if end < len(text) or _is_ended(text) else 1 << 30) for begin, end in found]
    if shape.reasoning not in REASONING_FORMATS:
        return []
    marks = REASONING_FORMATS[shape.reasoning]
    if not shape.has_begun and not text.lstrip().startswith(marks.open):
        return []
    ends = [text.find(marks.close) + len(marks.close)] if marks.close in text else []
    if form.ends_thoughts and form.opening in text:
        ends.append(text.find(form.opening))
    return [(0, min(ends, default=1 << 30))]


def _is_ended(text: str) -> bool:
    return text.endswith(("<|end|>", "<|return|>", "<|call|>"))


def counted_in(request: PreparedRequest, tokens: list[int], shape: Shape) -> tuple[int, int]:
    """How many tokens are reasoning, by where their texts stand, of how many up to a stop string."""
    assert isinstance(request.output_format, OutputFormat)
    text = ChoiceText(VisibleMarks(request.model.tokenizer, request.output_format.marks), (), request.ending_token_ids)
    ends, whole = [0], ""
    for token in tokens:
        whole += text.push(token).text
        ends.append(len(whole))
        if places := [place for stop in request.stop if (place := whole.find(stop)) >= 0]:
            whole = whole[: min(places)]
            break
    else:
        whole += text.finish()
    spans = thoughts_in(whole, shape)
    hits = [any(begin < span[1] and max(end, begin + 1) > span[0] for span in spans) for begin, end in pairwise(ends)]
    return sum(hits), len(hits)


def fed(client: Client, tokens: list[int], cuts: list[int], begin: int = 0, choice: int = 0) -> Client:
    ends = [*sorted({cut for cut in cuts if begin < cut < len(tokens)}), len(tokens)]
    for start, end in pairwise([begin, *ends]):
        client.feed(TokenChunk(choice, start, tokens[start:end], finish_reason=STOP if end == len(tokens) else UNFINISHED))
    return client


_BY_TOKEN: dict[tuple[object, ...], Client] = {}


def by_token(request: PreparedRequest, tokens: list[int]) -> Client:
    """The output that came token by token, read once for all tests."""
    said = request.output_format
    assert said is not None
    key = (id(request.model), said.tools, said.reasoning, said.has_begun, *tokens)
    if key not in _BY_TOKEN:
        _BY_TOKEN[key] = fed(Client(request), tokens, list(range(len(tokens))))
    return _BY_TOKEN[key]


def told(deltas: list[mesh_pb2.Delta]) -> int:
    return sum(delta.num_reasoning_tokens for delta in deltas)


@IS_SPELLED
@pytest.mark.parametrize("name", recorded.names())
def test_every_cut_counts_what_the_text_says(models: dict[bool, ServedModel], name: str, is_spelled: bool) -> None:
    rng = random.Random(name)
    for shape in recorded.shapes(name):
        request = prepared(models[is_spelled], shape)
        tokens = request.model.tokenizer.encode(shape.output)
        wanted, _ = counted_in(request, tokens, shape)
        assert wanted or not shape.message.thoughts, shape.title
        single = by_token(request, tokens)
        assert told(single.deltas) == single.output.num_reasoning_tokens == wanted, shape.title
        for cuts in ([], rng.choices(range(len(tokens)), k=5)):
            client = fed(Client(request), tokens, cuts)
            assert told(client.deltas) == client.output.num_reasoning_tokens == wanted, (shape.title, cuts)


@IS_SPELLED
@pytest.mark.parametrize("name", recorded.names())
def test_an_output_that_stops_anywhere_counts_alike(models: dict[bool, ServedModel], name: str, is_spelled: bool) -> None:
    """At a stop string, also one within a mark; or at a limit, also within thoughts."""
    rng = random.Random(name)
    for shape in recorded.shapes(name):
        place = rng.randrange(len(shape.output))
        request = prepared(models[is_spelled], shape, stop=(shape.output[place : place + rng.randint(1, 6)],))
        tokens = request.model.tokenizer.encode(shape.output)
        for cut in (tokens, tokens[: rng.randint(1, len(tokens))]):
            wanted, num_tokens = counted_in(request, cut, shape)
            for cuts in ([], list(range(len(cut)))):
                client = fed(Client(request), cut, cuts)
                assert told(client.deltas) == client.output.num_reasoning_tokens == wanted, (shape.title, request.stop)
                assert client.output.num_tokens == num_tokens


@IS_SPELLED
@pytest.mark.parametrize("name", recorded.names())
def test_a_resumed_stream_counts_all(models: dict[bool, ServedModel], name: str, is_spelled: bool) -> None:
    rng = random.Random(name)
    for shape in recorded.shapes(name):
        request = prepared(models[is_spelled], shape)
        tokens = request.model.tokenizer.encode(shape.output)
        whole = by_token(request, tokens)
        for at in rng.choices(range(1, len(tokens)), k=4):
            after = Client(request, [common_pb2.EmittedChoice(index=0, token_ids=tokens[:at])])
            fed(after, tokens, [], begin=at)
            assert after.output.num_reasoning_tokens == whole.output.num_reasoning_tokens
            assert told(whole.deltas[:at]) + told(after.deltas) == after.output.num_reasoning_tokens, (shape.title, at)


def test_choices_count_together_also_one_that_had_ended_before_the_resumption(models: dict[bool, ServedModel]) -> None:
    shape = Shape("two", "hermes", "think", False, "", Message())
    request = prepared(models[True], shape, n=2)
    first, second = (models[True].tokenizer.encode(text) for text in ("<think>Cut off", "<think>Hm.</think>So be it."))
    client = fed(fed(Client(request), first, [3]), second, [5, 12], choice=1)
    wanted = len("<think>Cut off") + len("<think>Hm.</think>")
    assert told(client.deltas) == client.output.num_reasoning_tokens == wanted
    emitted = [
        common_pb2.EmittedChoice(index=0, token_ids=first, finish_reason=STOP),
        common_pb2.EmittedChoice(index=1, token_ids=second[:9]),
    ]
    resumed = fed(Client(request, emitted), second, [], begin=9, choice=1)
    assert resumed.output.num_reasoning_tokens == wanted
    assert told(resumed.deltas) == len("<think>Hm.</think>") - len("<think>Hm")


def num_lines(segments: int) -> int:
    """How many lines of the parser's code run to settle the tokens of one more message behind so many thoughts."""
    parser = make_parser("harmony", "none", {})
    counted, whole = ReasoningTokens(parser), ""
    for text in (*(["<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"] * segments), "<|channel|>final<|message|>"):
        parser.feed(text)
        counted.add(len(whole), len(whole) + len(text))
        counted.settle()
        whole += text
    assert counted.num == segments
    lines = Counter[str]()

    def count(frame: FrameType, event: str, _: object) -> Any:
        lines[event] += 1
        return count

    for place in range(50):
        parser.feed("a")
        counted.add(len(whole) + place, len(whole) + place + 1)
    before = sys.gettrace()
    sys.settrace(count)
    try:
        counted.settle()
    finally:
        sys.settrace(before)
    return lines.total()


def test_a_token_costs_the_same_behind_any_number_of_thoughts() -> None:
    assert 50 < num_lines(400) == num_lines(4)
