"""Long texts wait for the tokenizer in a fair and bounded line, and what can never fit is refused without any work."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import cast

import pytest

from pdmesh.runtime.errors import DeadlineExceeded, InvalidArgument, ResourceExhausted
from pdmesh.v1 import mesh_pb2
from router.config import RouterConfig
from router.context import RouterContext
from router.tokenization import chat_prompt
from router.tokenization.prepared_request import ServedModel
from router.tokenization.preprocessor import LARGE_TEXT_CHARS, Asker, Preprocessor, Prompts
from router.tokenization.queue import (
    LONG_TEXT_BYTES,
    RETRY_DELAY_S,
    SHORT_IN_A_ROW,
    LineLimits,
    Piece,
    TokenizationPool,
    TokenizationQueue,
)
from tests.text.samples import make_tokenizer

LONG, SHORT = LONG_TEXT_BYTES + 1, 1000


def _line(*pieces: tuple[str, int, str], limits: LineLimits | None = None) -> TokenizationQueue[str]:
    line: TokenizationQueue[str] = TokenizationQueue(limits or LineLimits())
    for piece in pieces:
        line.push(Piece(*piece))
    return line


def _order(line: TokenizationQueue[str], *, long_too: bool = True) -> list[str]:
    order = []
    while (piece := line.pop(long_too=long_too)) is not None:
        order.append(piece.payload)
    return order


def test_a_short_text_goes_before_a_flood_of_long_ones() -> None:
    line = _line(*[("flood", LONG, "long")] * 5, ("other", SHORT, "short"))
    assert _order(line) == ["short", *["long"] * 5]


def test_tenants_take_turns() -> None:
    line = _line(("a", LONG, "a1"), ("a", LONG, "a2"), ("a", LONG, "a3"), ("b", LONG, "b1"), ("c", LONG, "c1"), ("b", LONG, "b2"))
    assert _order(line) == ["a1", "b1", "c1", "a2", "b2", "a3"]


def test_a_long_text_gets_its_turn_among_short_ones() -> None:
    line = _line(("b", LONG, "long"), *[("a", SHORT, "short")] * (SHORT_IN_A_ROW + 3))
    assert _order(line) == [*["short"] * SHORT_IN_A_ROW, "long", *["short"] * 3]


def test_long_ones_wait_where_only_short_ones_may_go() -> None:
    line = _line(("a", LONG, "long"), *[("a", SHORT, "short")] * (SHORT_IN_A_ROW + 3))
    assert _order(line, long_too=False) == ["short"] * (SHORT_IN_A_ROW + 3)
    assert len(line) == 1


@pytest.mark.parametrize(
    ("limits", "tenants"),
    [
        (LineLimits(max_tenant_pieces=2), "aa"),
        (LineLimits(max_tenant_bytes=2 * SHORT), "aa"),
        (LineLimits(max_pieces=2), "bc"),
        (LineLimits(max_bytes=2 * SHORT), "bc"),
    ],
)
def test_a_full_line_refuses_and_says_when_to_come_back(limits: LineLimits, tenants: str) -> None:
    line = _line(*((tenant, SHORT, tenant) for tenant in tenants), limits=limits)
    with pytest.raises(ResourceExhausted) as refused:
        line.push(Piece("a", SHORT, "more"))
    assert refused.value.retry_delay_s == RETRY_DELAY_S
    line.pop(long_too=True)
    line.push(Piece("a", SHORT, "more"))
    assert len(line) == 2


def test_a_tenant_whose_part_is_full_leaves_room_to_others() -> None:
    line = _line(("a", SHORT, "a"), limits=LineLimits(max_tenant_pieces=1))
    line.push(Piece("b", SHORT, "b"))
    assert _order(line) == ["a", "b"]


def test_who_leaves_takes_no_turn_and_no_room() -> None:
    line = _line(limits=LineLimits(max_pieces=2))
    stays, goes = Piece("a", SHORT, "stays"), Piece("b", LONG, "goes")
    line.push(stays)
    line.push(goes)
    line.remove(goes)
    line.remove(goes)
    line.push(Piece("b", SHORT, "next"))
    assert _order(line) == ["stays", "next"]


class _Held:
    """Work that says who did it, behind one piece that takes until `let_go`."""

    def __init__(self, tokenizing: TokenizationPool) -> None:
        self.tokenizing = tokenizing
        self.done: list[str] = []
        self._flow_control = threading.Event()
        self._begun = threading.Event()

    async def block(self) -> asyncio.Task[list[int]]:
        def work() -> list[int]:
            self._begun.set()
            self._flow_control.wait(30)
            return []

        task = self.start("blocker", LONG, work)
        await asyncio.to_thread(self._begun.wait, 30)
        return task

    def start(
        self, name: str, num_bytes: int, work: Callable[[], list[int]] | None = None, deadline: float | None = None
    ) -> asyncio.Task[list[int]]:
        def note() -> list[int]:
            self.done.append(name)
            return [len(name)]

        return asyncio.create_task(self.tokenizing.run(work or note, tenant=name, num_bytes=num_bytes, deadline=deadline))

    def let_go(self) -> None:
        self._flow_control.set()


async def test_results_and_errors_come_back() -> None:
    def fail() -> list[int]:
        raise InvalidArgument("prompt", "prompt: no")

    held = _Held(TokenizationPool())
    assert await held.start("abc", SHORT) == [3]
    with pytest.raises(InvalidArgument, match="no"):
        await held.start("abc", SHORT, fail)


async def test_a_short_text_passes_while_a_long_one_is_under_way() -> None:
    held = _Held(TokenizationPool(num_threads=2))
    blocker = await held.block()
    long = held.start("long", LONG)
    assert await held.start("short", SHORT) == [5]
    assert held.done == ["short"]
    held.let_go()
    await asyncio.gather(blocker, long)


async def test_one_thread_serves_in_the_line_s_order() -> None:
    held = _Held(TokenizationPool(num_threads=1))
    tasks = [await held.block(), *(held.start(name, size) for name, size in (("l1", LONG), ("l2", LONG), ("s", SHORT)))]
    await asyncio.sleep(0)
    held.let_go()
    await asyncio.gather(*tasks)
    assert held.done == ["s", "l1", "l2"]


async def test_a_passed_deadline_and_a_client_that_leaves_drop_their_work() -> None:
    held = _Held(TokenizationPool(num_threads=1))
    blocker = await held.block()
    leaves = held.start("leaves", SHORT)
    await asyncio.sleep(0)
    assert held.tokenizing.num_waiting == 1
    leaves.cancel()
    with pytest.raises(DeadlineExceeded):
        await held.start("late", SHORT, deadline=asyncio.get_running_loop().time())
    await asyncio.gather(leaves, return_exceptions=True)
    assert leaves.cancelled()
    assert held.tokenizing.num_waiting == 0
    held.let_go()
    await blocker
    assert await held.start("next", SHORT) == [4]
    assert held.done == ["next"]


async def test_a_deadline_ends_the_wait_for_work_under_way_and_the_thread_serves_again() -> None:
    held = _Held(TokenizationPool(num_threads=1))
    blocker = await held.block()
    blocker.cancel()
    await asyncio.gather(blocker, return_exceptions=True)
    after = held.start("after", SHORT)
    held.let_go()
    assert await after == [5]


TEMPLATE = "{% for m in messages %}{{ m.content[:9000] }}{% endfor %}"
ASKER = Asker("", None)


def _prompts(monkeypatch: pytest.MonkeyPatch, max_context: int) -> tuple[Prompts, ServedModel, list[int]]:
    """With a list of the lengths of all texts that were encoded."""
    tokenizer = make_tokenizer("byte_level")
    tokenizer.settings = SimpleNamespace(chat_template=TEMPLATE, special_tokens={})  # type: ignore[assignment]
    encoded: list[int] = []
    for name in ("encode", "encode_detached"):
        real = getattr(tokenizer, name)

        def spy(text: str, real: Callable[..., list[int]] = real, **kwargs: bool) -> list[int]:
            encoded.append(len(text))
            return real(text, **kwargs)

        monkeypatch.setattr(tokenizer, name, spy)
    model = ServedModel("m", tokenizer, None)  # type: ignore[arg-type]
    config = SimpleNamespace(max_prompt_bytes=1 << 21)
    core = SimpleNamespace(models={"m": model}, config=config, max_context=lambda _: max_context)
    return Prompts(cast(RouterContext, core)), model, encoded


async def test_a_text_that_cannot_fit_is_refused_without_encoding(monkeypatch: pytest.MonkeyPatch) -> None:
    prompts, model, encoded = _prompts(monkeypatch, max_context=100)
    with pytest.raises(
        InvalidArgument, match=r"maximum context length is 100 tokens\. However, you requested at least"
    ) as refused:
        await prompts.of_text(model, "x" * 20_000, ASKER)
    assert (refused.value.field, encoded) == ("prompt", [])
    assert len(await prompts.of_text(model, "x" * 20_000, ASKER, must_fit=False)) > 100


async def test_a_conversation_is_refused_by_what_the_template_makes_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    huge = chat_prompt.of_messages([mesh_pb2.ChatMessage(role="user", content="x" * 100_000)], 1 << 21)
    prompts, model, encoded = _prompts(monkeypatch, max_context=100)
    with pytest.raises(InvalidArgument, match=r"maximum context length is 100 tokens\. However, you requested at least"):
        await prompts.of_chat(model, huge, ASKER)
    assert encoded == []
    prompts, model, encoded = _prompts(monkeypatch, max_context=9000)
    await prompts.of_chat(model, huge, ASKER)
    assert encoded == [9000]


@pytest.mark.parametrize("size", [1, LARGE_TEXT_CHARS, LARGE_TEXT_CHARS + 1])
async def test_short_or_long_the_tokens_are_the_same(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    text = ("the quick dog é " * size)[:size]
    prompts, model, _ = _prompts(monkeypatch, max_context=10**6)
    assert await prompts.of_text(model, text, ASKER) == make_tokenizer("byte_level").encode(text)


async def test_short_texts_do_not_wait_in_line(monkeypatch: pytest.MonkeyPatch) -> None:
    prompts, model, _ = _prompts(monkeypatch, max_context=10**6)
    monkeypatch.setattr(prompts, "_in_line", None)
    assert await prompts.of_text(model, "x" * LARGE_TEXT_CHARS, ASKER)
    short = chat_prompt.of_messages([mesh_pb2.ChatMessage(role="user", content="x" * LARGE_TEXT_CHARS)], 1 << 21)
    assert (await prompts.of_chat(model, short, ASKER)).token_ids


class _Asked(Exception):
    """Ends a request once it is known for whom it asked."""


async def _asker(monkeypatch: pytest.MonkeyPatch, call: Callable[[Preprocessor], Awaitable[object]]) -> tuple[Asker, bool]:
    """For whom `call` has a text tokenized, and whether that must fit."""
    core = SimpleNamespace(models={"m": ServedModel("m", make_tokenizer("byte_level"), None)}, config=RouterConfig())  # type: ignore[arg-type]
    seen: list[tuple[Asker, bool]] = []

    async def note(self: Prompts, model: object, text: object, asker: Asker, *, must_fit: bool = True, **_: bool) -> list[int]:
        seen.append((asker, must_fit))
        raise _Asked

    monkeypatch.setattr(Prompts, "of_text", note)
    monkeypatch.setattr(Prompts, "of_chat", note)
    with pytest.raises(_Asked):
        await call(Preprocessor(cast(RouterContext, core)))
    return seen[0]


OPTIONS = mesh_pb2.RequestOptions(tenant="t")
TURNS = [mesh_pb2.ChatMessage(role="user", content="x")]


@pytest.mark.parametrize(
    ("call", "tenant", "must_fit"),
    [
        (lambda preprocessor: preprocessor.from_generate(mesh_pb2.GenerateRequest(text="x", options=OPTIONS), 1000.0), "t", True),
        (lambda preprocessor: preprocessor.from_chat(mesh_pb2.ChatRequest(messages=TURNS, options=OPTIONS), 1000.0), "t", True),
        (lambda preprocessor: preprocessor.tokenize(mesh_pb2.TokenizeRequest(text="x"), 1000.0), "", False),
        (lambda preprocessor: preprocessor.tokenize(mesh_pb2.TokenizeRequest(messages=TURNS), 1000.0), "", False),
    ],
)
async def test_each_call_waits_as_its_tenant_and_until_its_deadline(
    monkeypatch: pytest.MonkeyPatch, call: Callable[[Preprocessor], Awaitable[object]], tenant: str, must_fit: bool
) -> None:
    asker, fits = await _asker(monkeypatch, call)
    assert (asker.tenant, fits) == (tenant, must_fit)
    assert asker.deadline is not None
    assert asker.deadline > asyncio.get_running_loop().time()
