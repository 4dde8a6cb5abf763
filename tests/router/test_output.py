"""From tokens to deltas: text, stop strings, usage, replayed history. The grouping of tokens into spans must not matter."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdmesh.v1 import common_pb2, mesh_pb2
from router.lifecycle.output import UNFINISHED, Output, OutputTracker, ResumeMismatch, TokenChunk
from router.tokenization.prepared_request import PreparedRequest, ServedModel, load

LENGTH, STOP = common_pb2.FINISH_REASON_LENGTH, common_pb2.FINISH_REASON_STOP
EOS = 258


@pytest.fixture(scope="module")
def model(model_folder: Path) -> ServedModel:
    return load({"tiny": str(model_folder)})["tiny"]


def _prepared(model: ServedModel, stop: tuple[str, ...] = (), **sampling: object) -> PreparedRequest:
    params = common_pb2.SamplingParams(**{"n": 1, "max_tokens": 100, "seed": 1, **sampling})  # type: ignore[arg-type]
    return PreparedRequest("id", model, (1, 2), params, stop)


class Client:
    """Book and output of one request, and what its client has received."""

    def __init__(self, prepared: PreparedRequest, emitted: list[common_pb2.EmittedChoice] | None = None) -> None:
        self.tracker = OutputTracker(prepared.num_choices, emitted or [])
        self.output = Output(prepared, self.tracker)
        self.deltas = [message.delta for message in self.output.replay(emitted or [])]

    def feed(self, span: TokenChunk) -> None:
        for new in self.tracker.accept(span):
            message = self.output.render(new)
            if message is not None:
                self.deltas.append(message.delta)

    @property
    def text(self) -> str:
        return "".join(delta.text for delta in self.deltas)

    @property
    def tokens(self) -> list[int]:
        return [token for delta in self.deltas for token in delta.token_ids]


def _spans(tokens: list[int], cuts: list[int]) -> list[TokenChunk]:
    """`tokens` in pieces that end at `cuts`; the last one finishes with LENGTH."""
    ends = [*sorted({cut % len(tokens) for cut in cuts} - {0}), len(tokens)]
    starts = [0, *ends[:-1]]
    return [
        TokenChunk(0, start, tokens[start:end], finish_reason=LENGTH if end == len(tokens) else UNFINISHED)
        for start, end in zip(starts, ends, strict=True)
    ]


@settings(max_examples=60)
@given(
    text=st.text("abc ü€😀", min_size=1, max_size=40),
    stop=st.lists(st.text("abcü", min_size=1, max_size=3), max_size=3),
    cuts=st.lists(st.integers(0, 200)),
)
def test_grouping_does_not_matter(model: ServedModel, text: str, stop: list[str], cuts: list[int]) -> None:
    tokens = model.tokenizer.encode(text)
    prepared = _prepared(model, tuple(stop))
    state, pieces = Client(prepared), Client(prepared)
    state.feed(_spans(tokens, [])[0])
    for span in _spans(tokens, cuts):
        pieces.feed(span)
    assert (pieces.text, pieces.tokens) == (state.text, state.tokens)
    assert pieces.output.done and state.output.done
    assert pieces.output.num_tokens == len(pieces.tokens) == pieces.tracker.num_tokens
    _check_stop(state, text, stop)


def _check_stop(client: Client, text: str, stop: list[str]) -> None:
    last = client.deltas[-1]
    if not any(string in text for string in stop):
        assert (client.text, last.finish_reason, last.stop_reason) == (text, LENGTH, "")
        return
    assert last.finish_reason == STOP and last.stop_reason in stop
    assert text.startswith(client.text + last.stop_reason)
    assert not any(string in client.text for string in stop)


@settings(max_examples=60)
@given(
    text=st.text("abc ü€😀", min_size=1, max_size=30),
    stop=st.lists(st.text("abc", min_size=2, max_size=3), max_size=2),
    at=st.integers(0, 100),
)
def test_resume_anywhere_gives_the_same_text(model: ServedModel, text: str, stop: list[str], at: int) -> None:
    tokens = model.tokenizer.encode(text)
    prepared = _prepared(model, tuple(stop))
    before, after = Client(prepared), None
    for span in _spans(tokens, list(range(len(tokens))))[: at % len(tokens)]:
        before.feed(span)
    emitted = common_pb2.EmittedChoice(
        index=0, token_ids=before.tokens, finish_reason=before.deltas[-1].finish_reason if before.deltas else UNFINISHED
    )
    after = Client(prepared, [emitted])
    if not after.output.done:
        after.feed(TokenChunk(0, len(before.tokens), tokens[len(before.tokens) :], finish_reason=LENGTH))
    uninterrupted = Client(prepared)
    uninterrupted.feed(_spans(tokens, [])[0])
    assert before.text + after.text == uninterrupted.text
    assert before.tokens + after.tokens == uninterrupted.tokens
    assert after.output.num_tokens == uninterrupted.output.num_tokens


def test_stop_token_is_named_and_has_no_text(model: ServedModel) -> None:
    client = Client(_prepared(model))
    client.feed(TokenChunk(0, 0, [*model.tokenizer.encode("hi"), EOS], finish_reason=STOP))
    assert (client.text, client.tokens[-1], client.deltas[-1].stop_reason) == ("hi", EOS, "<|im_end|>")


def test_held_back_text_comes_with_the_end(model: ServedModel) -> None:
    client = Client(_prepared(model, ("stop!",)))
    client.feed(TokenChunk(0, 0, model.tokenizer.encode("do sto")))
    assert client.text == "do "
    client.feed(TokenChunk(0, 6, model.tokenizer.encode("p"), finish_reason=LENGTH))
    assert client.text == "do stop"
    assert client.deltas[-1].finish_reason == LENGTH


@pytest.mark.parametrize(
    ("tokens", "sampling", "stop", "end"),
    [
        ("abc", {"max_tokens": 3}, (), (LENGTH, "")),
        ("abc", {}, ("bc",), (STOP, "bc")),
        ("ab", {}, ("bc",), None),
        ([64, EOS], {}, (), (STOP, "<|im_end|>")),
        ([64, EOS], {"ignore_eos": True}, (), None),
        ([64, 70], {"stop_token_ids": [70]}, (), (STOP, "g")),
        ([EOS, 64], {"min_tokens": 1}, (), None),  # before min_tokens no token ends an output
        ("abcd", {}, ("bc",), ResumeMismatch),
        ([EOS, 64], {}, (), ResumeMismatch),
    ],
)
def test_history_that_is_complete(
    model: ServedModel, tokens: str | list[int], sampling: dict[str, object], stop: tuple[str, ...], end: object
) -> None:
    token_ids = model.tokenizer.encode(tokens) if isinstance(tokens, str) else tokens
    emitted = [common_pb2.EmittedChoice(index=0, token_ids=token_ids)]
    if end is ResumeMismatch:
        with pytest.raises(ResumeMismatch):
            Client(_prepared(model, stop, **sampling), emitted)
        return
    client = Client(_prepared(model, stop, **sampling), emitted)
    assert client.output.done is (end is not None) is client.tracker.all_finished
    assert [(delta.finish_reason, delta.stop_reason) for delta in client.deltas] == ([end] if end else [])


def test_a_finished_choice_says_nothing_more(model: ServedModel) -> None:
    client = Client(_prepared(model, ("b",), n=2))
    client.feed(TokenChunk(0, 0, model.tokenizer.encode("abc")))
    client.feed(TokenChunk(1, 0, model.tokenizer.encode("x"), finish_reason=LENGTH))
    client.feed(TokenChunk(0, 3, model.tokenizer.encode("d"), finish_reason=LENGTH))
    assert [(delta.choice, delta.text) for delta in client.deltas] == [(0, "a"), (1, "x")]
    assert client.output.done and client.output.num_tokens == 3
    assert isinstance(client.deltas[0], mesh_pb2.Delta)
