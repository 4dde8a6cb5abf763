"""From a client's message to a PreparedRequest: find the model, check, tokenize, complete."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from pdmesh.adapter_id import AdapterId
from pdmesh.runtime.errors import DeadlineExceeded, InvalidArgument, NotFound
from pdmesh.text.grammar import CompiledGrammar
from pdmesh.text.parsers.registry import NONE
from pdmesh.v1 import common_pb2, mesh_pb2
from router.api import validation
from router.auth import identity
from router.context import RouterContext
from router.tokenization import chat_prompt
from router.tokenization.call_grammar import behind_thoughts, constrained
from router.tokenization.chat_prompt import ChatPrompt
from router.tokenization.prepared_request import (
    FormatNames,
    OutputFormat,
    PreparedRequest,
    ServedModel,
    SessionState,
    format_of,
    scoped_salt,
)
from router.tokenization.queue import TokenizationPool

# Text and conversations as tokens: short ones at once, long ones in the queue of `TokenizationPool`.


LARGE_TEXT_CHARS = 8192
"""Longer texts are tokenized in a thread, so that they do not block the streams on the event loop."""


@dataclass(frozen=True)
class Asker:
    """The tenant for whom a text is tokenized, and the deadline (event-loop time)."""

    tenant: str
    deadline: float | None


@dataclass(frozen=True)
class RenderedChat:
    """Hold a conversation as tokens, and the text that they are."""

    token_ids: list[int]
    text: str


class Prompts:
    """Tokenizes the prompts of one router."""

    def __init__(self, core: RouterContext, tokenizing: TokenizationPool | None = None) -> None:
        self._core = core
        self._tokenizing = tokenizing or TokenizationPool()
        for model in core.models.values():
            model.tokenizer.fewest_tokens("")  # reads the vocabulary now, not when the first long text comes

    async def of_text(
        self, model: ServedModel, text: str, asker: Asker, *, must_fit: bool = True, add_special_tokens: bool = True
    ) -> list[int]:
        """Return token ids. `must_fit`: refuse what cannot fit the context before any work on it. `add_special_tokens`: with
        those that the model wants around every text.

        Raises InvalidArgument, ResourceExhausted, DeadlineExceeded.
        """
        if len(text) <= LARGE_TEXT_CHARS:
            return model.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        if must_fit:
            self._check_can_fit(model, text)
        encode = partial(model.tokenizer.encode_detached, text, add_special_tokens=add_special_tokens)
        return await self._in_line(encode, len(text.encode()), asker)

    async def of_chat(self, model: ServedModel, chat: ChatPrompt, asker: Asker, *, must_fit: bool = True) -> RenderedChat:
        """As `of_text`, of messages that have been checked. A template may leave out much of them: what cannot fit is refused
        once it is rendered."""
        if chat.num_bytes <= LARGE_TEXT_CHARS:
            return _rendered(model, chat)
        check = partial(self._check_can_fit, model) if must_fit else None
        texts: list[str] = []
        token_ids = await self._in_line(lambda: _long_tokens(model, chat, check, texts.append), chat.num_bytes, asker)
        return RenderedChat(token_ids, texts[0])

    async def _in_line(self, work: Callable[[], list[int]], num_bytes: int, asker: Asker) -> list[int]:
        return await self._tokenizing.run(work, tenant=asker.tenant, num_bytes=num_bytes, deadline=asker.deadline)

    def _check_can_fit(self, model: ServedModel, text: str) -> None:
        validation.check_can_fit(model.tokenizer.fewest_tokens(text), self._core.max_context(model))


def _rendered(model: ServedModel, chat: ChatPrompt) -> RenderedChat:
    text = _render(model, chat)
    return RenderedChat(model.tokenizer.encode(text, add_special_tokens=False), text)


def _long_tokens(
    model: ServedModel, chat: ChatPrompt, check: Callable[[str], None] | None, on_text: Callable[[str], None]
) -> list[int]:
    """Rendered, checked, encoded; in a thread. `on_text` gets what was rendered."""
    text = _render(model, chat)
    on_text(text)
    if check is not None:
        check(text)
    return model.tokenizer.encode_detached(text, add_special_tokens=False)


def _render(model: ServedModel, chat: ChatPrompt) -> str:
    try:
        return model.tokenizer.render_chat(chat.turns, chat.how)
    except ValueError as error:
        field, _, problem = str(error).partition(": ")
        if field not in ("chat_template_kwargs", "continue_final_message"):
            field, problem = "messages", str(error)
        raise InvalidArgument(field, f"{field}: {problem}") from error


FAR_AWAY_S = 10.0**8
MAX_LOGGED_CHARS = 4000

logger = logging.getLogger(__name__)


ClientMessage = mesh_pb2.GenerateRequest | mesh_pb2.ChatRequest


@dataclass(frozen=True)
class ValidatedRequest:
    """A client's message that may be tokenized. `deadline` is in event-loop time, None without one."""

    message: ClientMessage
    model: ServedModel
    deadline: float | None
    adapter: AdapterId | None = None
    chat: ChatPrompt | None = None  # of a ChatRequest

    def session_state(self) -> SessionState | None:
        """Return the state of the request's session, not released yet; None without a session."""
        options = self.message.options
        return SessionState(options.tenant, options.session_id, self.model.name) if options.session_id else None


@dataclass(frozen=True)
class _Rest:
    """Hold what Generate and Chat have in common besides the prompt."""

    sampling: common_pb2.SamplingParams
    options: mesh_pb2.RequestOptions
    resume: mesh_pb2.Resume | None
    deadline: float | None
    grammar: CompiledGrammar | None
    is_chat: bool
    adapter: AdapterId | None
    output_format: OutputFormat | None


class Preprocessor:
    """Prepares the requests of one router."""

    def __init__(self, core: RouterContext) -> None:
        self._core = core
        self._prompts = Prompts(core)
        self._formats = {name: FormatNames(*core.config.parsers_of(name)) for name in core.models}

    async def from_generate(self, request: mesh_pb2.GenerateRequest, time_left_s: float | None) -> PreparedRequest:
        """Return the prepared request. Raises InvalidArgument naming the field, NotFound, DeadlineExceeded."""
        return await self.prepare(self.validate(request, time_left_s))

    async def from_chat(self, request: mesh_pb2.ChatRequest, time_left_s: float | None) -> PreparedRequest:
        """As `from_generate`."""
        return await self.prepare(self.validate(request, time_left_s))

    def validate(self, message: ClientMessage, time_left_s: float | None) -> ValidatedRequest:
        """Return `message` with its model and deadline. What depends on the number of tokens is checked by `prepare`.

        Raises InvalidArgument naming the field, NotFound, DeadlineExceeded."""
        deadline = deadline_of(time_left_s)
        model, adapter = self._find(message.model)
        validation.check_options(message.options)
        identity.claim(message.options)
        if isinstance(message, mesh_pb2.ChatRequest):
            chat = chat_prompt.of_request(message, self._core.config.max_prompt_bytes)
            return ValidatedRequest(message, model, deadline, adapter, chat)
        self._check_prompt(model, message)
        return ValidatedRequest(message, model, deadline, adapter)

    async def prepare(self, validated: ValidatedRequest) -> PreparedRequest:
        """Return the request with its token ids, and every parameter set.

        Raises InvalidArgument naming the field, ResourceExhausted, DeadlineExceeded."""
        if validated.chat is None:
            rest = await _rest(validated, _with_ends_of_gap(validated))
            return await self._checked(validated.model, await self._token_ids(validated), rest)
        asker = Asker(validated.message.options.tenant, validated.deadline)
        rendered = await self._prompts.of_chat(validated.model, validated.chat, asker)
        rest = await self._chat_rest(validated, validated.chat, rendered.text)
        return await self._checked(validated.model, rendered.token_ids, rest)

    async def _chat_rest(self, validated: ValidatedRequest, chat: ChatPrompt, prompt: str) -> _Rest:
        """As `_rest`, of a chat: with how its output is read, and with the grammar of its calls."""
        model, sampling, offered = validated.model, validated.message.sampling, chat.tools
        max_calls = None if offered.is_parallel else 1
        names = self._formats[model.name]
        if sampling.HasField("constraint"):
            names = replace(names, reasoning=NONE)  # it holds from the first token on, unless the model thinks before
        output_format = format_of(model.tokenizer, names, offered.schemas, prompt, max_calls=max_calls)
        is_ours = not self._core.config.engine_address  # a stock engine may not read these grammars
        held = await constrained(model, sampling, offered, output_format, forces_opened=is_ours)
        if sampling.HasField("constraint") and is_ours:
            thinking = await self._thinking_rest(validated, chat, prompt)
            if thinking is not None:
                return thinking
        rest = await _rest(validated, held, output_format)
        if held is sampling or offered.is_required or await _follows(rest):
            return rest
        return await _rest(validated, sampling, output_format)

    async def _thinking_rest(self, validated: ValidatedRequest, chat: ChatPrompt, prompt: str) -> _Rest | None:
        """As `_chat_rest`, with a constraint that holds behind thoughts; None where it holds from the first token on."""
        model, max_calls = validated.model, None if chat.tools.is_parallel else 1
        names, schemas = self._formats[model.name], chat.tools.schemas
        output_format = format_of(model.tokenizer, names, schemas, prompt, max_calls=max_calls)
        held = await behind_thoughts(model, validated.message.sampling, output_format)
        if held is None or output_format is None:
            return None
        rest = await _rest(validated, held, replace(output_format, is_constrained=True))
        return rest if await _follows(rest) else None

    async def tokenize(
        self, request: mesh_pb2.TokenizeRequest, time_left_s: float | None, *, add_special_tokens: bool = True
    ) -> mesh_pb2.TokenizeResponse:
        """Return token ids, also of texts that are longer than the context. Raises as `from_generate`."""
        asker = Asker(identity.tenant() or "", deadline_of(time_left_s))
        model, _ = self._find(request.model)
        if request.text and request.messages:
            validation.refuse("text", "exclusive with messages; send one of them")
        if request.messages:
            chat = chat_prompt.of_tokenize(request, self._core.config.max_prompt_bytes)
            token_ids = (await self._prompts.of_chat(model, chat, asker, must_fit=False)).token_ids
        else:
            if request.tools or request.chat_template_kwargs:
                validation.refuse("text", "excludes tools and chat_template_kwargs, which go with messages")
            validation.check_prompt_text(request.text, self._core.config.max_prompt_bytes, field="text")
            token_ids = await self._prompts.of_text(
                model, request.text, asker, must_fit=False, add_special_tokens=add_special_tokens
            )
        return mesh_pb2.TokenizeResponse(token_ids=token_ids, max_context=self._core.max_context(model))

    async def count_chat(self, request: mesh_pb2.ChatRequest, time_left_s: float | None) -> int:
        """Return the number of tokens of a chat's prompt: tools, template variables and its end are those of `from_chat`.

        Raises as `from_chat`, except that the prompt may be longer than the context."""
        validated = self.validate(request, time_left_s)
        assert validated.chat is not None, "a ChatRequest has a chat"
        asker = Asker(request.options.tenant, validated.deadline)
        return len((await self._prompts.of_chat(validated.model, validated.chat, asker, must_fit=False)).token_ids)

    def _find(self, name: str) -> tuple[ServedModel, AdapterId | None]:
        """Return the model of this name, or the adapter of this name with its model."""
        models = self._core.models
        if not name and len(models) == 1:
            return next(iter(models.values())), None
        if not name:
            validation.refuse("model", f"name one of {', '.join(sorted(models))}")
        if name in models:
            return models[name], None
        found = self._core.adapters.find(name, models)
        if found is None:
            served = [*sorted(models), *(adapter for _, adapter in self._core.adapters.names(models))]
            raise NotFound(f"model: {name[:100]!r} is not served here; there is {', '.join(served[:50])}", field="model")
        return models[found[0]], found[1]

    def model_of(self, name: str) -> ServedModel:
        """Return the model that a request for this name is computed by. Raises InvalidArgument, NotFound."""
        return self._find(name)[0]

    def _check_prompt(self, model: ServedModel, request: mesh_pb2.GenerateRequest) -> None:
        kind = request.WhichOneof("prompt")
        if request.suffix:
            validation.check_prompt_text(request.suffix, self._core.config.max_prompt_bytes, field="suffix")
            if model.gap is None:
                validation.refuse("suffix", f"{model.name} has no tokens for a gap (fill-in-the-middle); leave it out")
        if kind == "text":
            if request.text or not request.suffix:  # nothing may stand before a gap
                validation.check_prompt_text(request.text, self._core.config.max_prompt_bytes)
        elif kind == "tokens":
            validation.check_tokens("tokens.ids", request.tokens.ids, model.tokenizer.vocab_size)
        else:
            validation.refuse("prompt", "it is missing; send text or tokens")

    async def _token_ids(self, validated: ValidatedRequest) -> list[int]:
        message, model = validated.message, validated.model
        assert isinstance(message, mesh_pb2.GenerateRequest), "a chat is rendered"
        asker = Asker(message.options.tenant, validated.deadline)
        if message.suffix:
            return await self._around_gap(model, message, asker)
        if message.WhichOneof("prompt") == "text":
            return await self._prompts.of_text(model, message.text, asker)
        return list(message.tokens.ids)

    async def _around_gap(self, model: ServedModel, message: mesh_pb2.GenerateRequest, asker: Asker) -> list[int]:
        """Return the prompt whose output goes between prompt and suffix."""
        assert model.gap is not None, "it has been checked"
        if message.WhichOneof("prompt") == "text":
            before = await self._prompts.of_text(model, message.text, asker, add_special_tokens=False)
        else:
            before = list(message.tokens.ids)
        after = await self._prompts.of_text(model, message.suffix, asker, add_special_tokens=False)
        return model.gap.prompt(before, after)

    async def _checked(self, model: ServedModel, prompt: list[int], rest: _Rest) -> PreparedRequest:
        prepared = self._prepared(model, prompt, rest)
        if self._core.config.log_requests:
            logger.info(
                "request %s of tenant %r: %s",
                prepared.request_id,
                prepared.tenant,
                model.tokenizer.decode(prompt)[:MAX_LOGGED_CHARS],
            )
        if rest.grammar is not None and rest.resume is not None:
            await validation.check_history(rest.grammar, rest.resume.emitted)
        return prepared

    def _prepared(self, model: ServedModel, prompt: list[int], rest: _Rest) -> PreparedRequest:
        max_context = self._core.max_context(model)
        validation.check_prompt_length(len(prompt), max_context, rest.sampling.max_tokens)
        limits = validation.Limits(
            model.tokenizer.vocab_size,
            model.eos_token_ids,
            max_context - len(prompt),
            model.sampling_defaults,
            num_prompt=len(prompt),
            clips=rest.options.clip_max_tokens,
        )
        params = validation.complete(rest.sampling, limits)
        emitted: tuple[common_pb2.EmittedChoice, ...] = ()
        if rest.resume is not None:
            emitted = validation.check_resume(rest.resume, params, limits.vocab_size)
            params.seed = rest.resume.seed
        if not params.HasField("seed"):
            params.seed = secrets.randbits(64)
        options = rest.options
        return PreparedRequest(
            request_id=options.request_id or secrets.token_hex(8),
            model=model,
            prompt=tuple(prompt),
            sampling=params,
            stop=tuple(rest.sampling.stop),
            emitted=emitted,
            system_fingerprint="" if rest.resume is None else rest.resume.system_fingerprint,
            tenant=options.tenant,
            priority=options.priority or common_pb2.PRIORITY_STANDARD,
            cache_salt=scoped_salt(options.tenant, options.cache_salt),
            mode=validation.mode_of(options),
            deadline=rest.deadline,
            slo_ttft_ms=options.slo_ttft_ms,
            slo_tpot_ms=options.slo_tpot_ms,
            attempt=options.attempt,
            session_id=options.session_id,
            kv_retention_s=self._retention_s(options),
            session_final=options.session_final,
            priority_hint=options.priority_hint,
            is_chat=rest.is_chat,
            adapter=rest.adapter,
            output_format=rest.output_format,
        )

    def _retention_s(self, options: mesh_pb2.RequestOptions) -> int:
        """Return how long the KV is to be kept. The last request of a session leaves nothing that is worth keeping."""
        default_s = self._core.config.session_kv_retention_s if options.session_id else 0
        return 0 if options.session_final else options.kv_retention_s or default_s


def deadline_of(time_left_s: float | None) -> float | None:
    """Return the remaining time as a deadline on the event loop's clock; None without one. Raises DeadlineExceeded."""
    if time_left_s is None or time_left_s > FAR_AWAY_S:
        return None
    if time_left_s <= 0:
        raise DeadlineExceeded("the deadline had passed when the request arrived")
    return asyncio.get_running_loop().time() + time_left_s


async def _rest(
    validated: ValidatedRequest, sampling: common_pb2.SamplingParams | None = None, output_format: OutputFormat | None = None
) -> _Rest:
    """Return the rest of a message. `sampling`: in place of the message's."""
    message = validated.message
    sampling = message.sampling if sampling is None else sampling
    resume = message.resume if message.HasField("resume") else None
    grammar = await validation.compile_constraint(validated.model.grammars, sampling)
    is_chat = isinstance(message, mesh_pb2.ChatRequest)
    return _Rest(sampling, message.options, resume, validated.deadline, grammar, is_chat, validated.adapter, output_format)


def _with_ends_of_gap(validated: ValidatedRequest) -> common_pb2.SamplingParams:
    """Return the sampling parameters, where a gap is filled with the tokens that end its text."""
    sampling, gap = validated.message.sampling, validated.model.gap if getattr(validated.message, "suffix", "") else None
    if gap is None:
        return sampling
    completed = common_pb2.SamplingParams()
    completed.CopyFrom(sampling)
    known = {*sampling.stop_token_ids, *validated.model.eos_token_ids}
    completed.stop_token_ids.extend(token_id for token_id in gap.stops if token_id not in known)
    return completed


async def _follows(rest: _Rest) -> bool:
    """Return whether the output from which a client resumes follows a grammar that the client has not asked for: the router that
    it comes from may have added none."""
    if rest.grammar is None or rest.resume is None:
        return True
    try:
        await validation.check_history(rest.grammar, rest.resume.emitted)
    except InvalidArgument:
        return False
    return True
