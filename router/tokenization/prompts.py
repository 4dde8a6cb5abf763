"""Text and conversations as tokens: short ones at once, long ones in the line of `Tokenizing`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from pdmesh.runtime.errors import InvalidArgument
from pdmesh.text.chat_template import Message
from router.api import validation
from router.context import Core
from router.tokenization.queue import Tokenizing
from router.tokenization.served_model import ServedModel

LARGE_TEXT_CHARS = 8192
"""Longer texts are tokenized in a thread: the event loop has streams to serve."""


@dataclass(frozen=True)
class Asker:
    """For whom a text is tokenized, and until when (event-loop time)."""

    tenant: str
    deadline: float | None


class Prompts:
    """Makes prompts for one router."""

    def __init__(self, core: Core, tokenizing: Tokenizing | None = None) -> None:
        self._core = core
        self._tokenizing = tokenizing or Tokenizing()
        for model in core.models.values():
            model.tokenizer.fewest_tokens("")  # reads the vocabulary: now, not when the first long text comes

    async def of_text(self, model: ServedModel, text: str, asker: Asker, *, must_fit: bool = True) -> list[int]:
        """Token ids. `must_fit`: refuse what cannot fit the context before any work on it.

        Raises InvalidArgument, ResourceExhausted, DeadlineExceeded."""
        if len(text) <= LARGE_TEXT_CHARS:
            return model.tokenizer.encode(text)
        if must_fit:
            self._check_can_fit(model, text)
        return await self._in_line(lambda: model.tokenizer.encode_detached(text), len(text.encode()), asker)

    async def of_chat(
        self, model: ServedModel, messages: validation.Messages, asker: Asker, *, must_fit: bool = True
    ) -> list[int]:
        """As `of_text`. A template may leave out much of what it is given: what cannot fit is refused once it is rendered."""
        validation.check_messages(messages, self._core.config.max_prompt_bytes)
        turns = [Message(message.role, message.content) for message in messages]
        if sum(len(turn.content) for turn in turns) <= LARGE_TEXT_CHARS:
            return _of_turns(model, turns)
        num_bytes = sum(len(turn.content.encode()) for turn in turns)
        check = partial(self._check_can_fit, model) if must_fit else None
        return await self._in_line(lambda: _of_long_turns(model, turns, check), num_bytes, asker)

    async def _in_line(self, work: Callable[[], list[int]], num_bytes: int, asker: Asker) -> list[int]:
        return await self._tokenizing.run(work, tenant=asker.tenant, num_bytes=num_bytes, deadline=asker.deadline)

    def _check_can_fit(self, model: ServedModel, text: str) -> None:
        validation.check_can_fit(model.tokenizer.fewest_tokens(text), self._core.max_context(model))


def _of_turns(model: ServedModel, turns: list[Message]) -> list[int]:
    try:
        return model.tokenizer.apply_chat_template(turns)
    except ValueError as error:
        raise InvalidArgument("messages", f"messages: {error}") from error


def _of_long_turns(model: ServedModel, turns: list[Message], check: Callable[[str], None] | None) -> list[int]:
    """Rendered, checked, encoded; in a thread."""
    try:
        text = model.tokenizer.render_chat(turns)
        if check is not None:
            check(text)
        return model.tokenizer.encode_detached(text, add_special_tokens=False)
    except ValueError as error:
        raise InvalidArgument("messages", f"messages: {error}") from error
