"""Translation of a TokenRequest of the wire, checked field by field, into an EngineRequest.

The checks here are those that only the wire needs (presence, indexes, fields of the router). The engine checks vocabulary and
context, in one place for all its callers.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from pdmesh.adapter_id import AdapterId
from pdmesh.engine.kv_cache.retention import MAX_SECONDS, Retention
from pdmesh.engine.request import EngineRequest
from pdmesh.engine.sampling.grammar import Grammar, Matcher
from pdmesh.runtime.errors import FailedPrecondition, InvalidArgument
from pdmesh.runtime.files import cache_root_of
from pdmesh.runtime.work_threads import WorkThreads
from pdmesh.sampling_params import MAX_BIASES, MAX_CHOICES, MAX_LOGPROBS, PARAMETERS, Kind, Parameter, SamplingParams
from pdmesh.v1 import common_pb2
from pdmesh.worker.description import identity_of, layout_of
from pdmesh.worker.engines.base import EngineFacts

if TYPE_CHECKING:
    from pdmesh.text.grammar import CompiledGrammar, GrammarCompiler

_NO_TOKENIZER = "this worker's model is no folder with a tokenizer; `pdmesh models fetch` makes one"
_FIELDS = common_pb2.SamplingParams.DESCRIPTOR.fields_by_name
MAX_SESSION_ID = 256
AdapterOf = Callable[[str, str], AdapterId]
_Emitted = tuple[tuple[int, ...], ...]
_Matchers = tuple[Matcher | None, ...]

# Few threads, because each has a memory arena of its own: with many short-lived grammars, six threads fragment memory more than
# two. A constraint that the router accepted compiles within the limit.
threads = WorkThreads("grammar", num_threads=2, max_waiting=64, timeout_s=10.0)

logger = logging.getLogger(__name__)


class NoTokenizer(Exception):
    """The model is no folder with a tokenizer, so no output of it can be constrained."""


class Grammars(Protocol):
    """Compile constraints for one model, as `GrammarCompiler` does."""

    def known(self, kind: str, source: str | Sequence[str]) -> CompiledGrammar | None:
        """Return a grammar compiled before; None: it must be compiled. Raises ValueError if it was rejected before."""

    def compile(self, kind: str, source: str | Sequence[str]) -> CompiledGrammar:
        """Return the compiled grammar. Raises ValueError that says what is wrong; NoTokenizer."""


@dataclass(frozen=True)
class TokenRequestTranslator:
    """Translate requests for a worker that serves `model`. `cache_root(tenant, cache_salt)` is the hash with which block hashes
    begin, `weights_hash()` that of the weights, both of now; `grammars` compiles constraints; None: no request may have one."""

    model: str
    cache_root: Callable[[str, str], bytes]
    grammars: Grammars | None = None
    adapter_of: AdapterOf | None = None  # from name and digest; None: the worker has no adapters
    weights_hash: Callable[[], str] = lambda: ""

    async def __call__(self, request: common_pb2.TokenRequest) -> EngineRequest:
        """Return the engine's request. Raises InvalidArgument, or FailedPrecondition for another model, naming the field in
        `request`."""
        # Before anything is waited for: the caller has compared identities just now, and the weights may be replaced meanwhile.
        weights_hash, cache_root = self.weights_hash(), self.cache_root(request.tenant, request.cache_salt)
        if request.model != self.model:
            raise FailedPrecondition("request.model", f"this worker serves {self.model!r}, not {request.model[:80]!r}")
        if not request.prompt_token_ids:
            raise InvalidArgument("request.prompt_token_ids", "empty; give at least one token")
        sampling = _sampling(request.sampling)
        emitted, finished = _history(request, sampling.n)
        grammar, matchers = await self._constraint(request.sampling, emitted, finished)
        return EngineRequest(
            request_id="",  # the services set it
            prompt=tuple(request.prompt_token_ids),
            sampling=sampling,
            emitted=emitted,
            finished=finished,
            cache_root=cache_root,
            weights_hash=weights_hash,
            adapter=self._adapter(request),
            retention=_retention(request),
            grammar=grammar,
            matchers=matchers,
        )

    def _adapter(self, request: common_pb2.TokenRequest) -> AdapterId | None:
        if not request.adapter:
            return None
        if self.adapter_of is None:
            raise FailedPrecondition("request.adapter", f"adapter {request.adapter[:80]!r} is not loaded on this worker")
        return self.adapter_of(request.adapter, request.adapter_digest)

    async def _constraint(
        self, sampling: common_pb2.SamplingParams, emitted: _Emitted, finished: tuple[bool, ...]
    ) -> tuple[Grammar | None, _Matchers]:
        """Return the compiled constraint, and its matchers replayed over the history of each unfinished choice. The work runs in
        threads, so that neither the event loop nor the engine waits."""
        if not sampling.HasField("constraint"):
            return None, ()
        field = "request.sampling.constraint"
        kind = sampling.constraint.WhichOneof("kind")
        if kind is None:
            raise InvalidArgument(field, "is empty; give one of json_schema, regex, choice and grammar")
        if self.grammars is None:
            raise FailedPrecondition(field, _NO_TOKENIZER)
        source = _source(sampling.constraint)
        try:
            grammar = self.grammars.known(kind, source)
            if grammar is None:
                grammar = await threads.run(partial(self.grammars.compile, kind, source))
            return grammar, await threads.run(partial(_replay, grammar, emitted, finished)) if any(emitted) else ()
        except TimeoutError:
            raise InvalidArgument(f"{field}.{kind}", f"takes more than {threads.timeout_s:.0f} s; make it simpler") from None
        except NoTokenizer:
            raise FailedPrecondition(field, _NO_TOKENIZER) from None
        except ValueError as error:
            raise InvalidArgument(f"{field}.{kind}", str(error)) from error


def _replay(grammar: CompiledGrammar, emitted: _Emitted, finished: tuple[bool, ...]) -> _Matchers:
    """Return the matchers after the history of each choice. Raises InvalidArgument for a history that does not follow its
    grammar."""
    matchers: list[Matcher | None] = []
    for choice, (output, is_over) in enumerate(zip(emitted, finished, strict=True)):
        matcher, stray = (None, None) if is_over else grammar.follow(output)
        if stray is not None:
            field = f"request.emitted[{choice}].token_ids[{stray}]"
            raise InvalidArgument(field, "does not follow sampling.constraint")
        matchers.append(matcher)
    return tuple(matchers)


def check_session(field: str, session_id: str) -> None:
    """Raise InvalidArgument, naming the field, unless it may be the id of a session, or none. The error does not repeat it: ids
    of sessions are kept out of logs."""
    if len(session_id) > MAX_SESSION_ID or not all("!" <= character <= "~" for character in session_id):
        problem = f"its {len(session_id)} characters are not up to {MAX_SESSION_ID} printable ones of ASCII without spaces"
        raise InvalidArgument(field, problem)


def _retention(request: common_pb2.TokenRequest) -> Retention | None:
    """Return what the request retains, or whose blocks it releases; None: neither."""
    session, seconds, is_final = request.session_id, request.kv_retention_s, request.session_final
    check_session("request.session_id", session)
    if seconds > MAX_SECONDS:
        raise InvalidArgument("request.kv_retention_s", f"{seconds} is more than {MAX_SECONDS}; give at most that")
    if is_final and not session:
        raise InvalidArgument("request.session_final", "set without session_id; name the session that ends")
    return Retention(request.tenant, session, seconds, is_final) if seconds or is_final else None


def _source(constraint: common_pb2.Constraint) -> str | tuple[str, ...]:
    kind = constraint.WhichOneof("kind")
    return tuple(constraint.choice.values) if kind == "choice" or kind is None else str(getattr(constraint, kind))


def _sampling(wire: common_pb2.SamplingParams) -> SamplingParams:
    for field in ("seed", "max_tokens"):
        if not wire.HasField(field):
            raise InvalidArgument(f"request.sampling.{field}", "missing; the router sets it")
    if wire.stop:
        raise InvalidArgument("request.sampling.stop", "stop strings are the router's; workers know tokens only")
    if wire.n > MAX_CHOICES:
        raise InvalidArgument("request.sampling.n", f"{wire.n} choices; at most {MAX_CHOICES}")
    if wire.logprobs > MAX_LOGPROBS:
        raise InvalidArgument("request.sampling.logprobs", f"{wire.logprobs} alternatives; at most {MAX_LOGPROBS}")
    if wire.prompt_logprobs > MAX_LOGPROBS:
        raise InvalidArgument("request.sampling.prompt_logprobs", f"{wire.prompt_logprobs} alternatives; at most {MAX_LOGPROBS}")
    if len(wire.logit_bias) > MAX_BIASES:
        raise InvalidArgument("request.sampling.logit_bias", f"{len(wire.logit_bias)} tokens; at most {MAX_BIASES}")
    params = SamplingParams(**{parameter.name: _value(wire, parameter) for parameter in PARAMETERS})
    _check_ranges(params)
    return params


def _value(wire: common_pb2.SamplingParams, parameter: Parameter) -> Any:
    """Return the field's value; the default where the field is absent, or is 0 and cannot be absent."""
    value = getattr(wire, parameter.name)
    if parameter.kind is Kind.TOKENS:
        return tuple(value)
    if parameter.kind is Kind.BIASES:
        return tuple((each.token_id, each.bias) for each in value)
    is_given = wire.HasField(parameter.name) if _FIELDS[parameter.name].has_presence else value  # type: ignore[arg-type]
    return value if is_given else parameter.default


def _check_ranges(params: SamplingParams) -> None:
    try:
        params.validate()
    except ValueError as error:
        field, _, problem = str(error).partition(": ")
        raise InvalidArgument(f"request.sampling.{field}", problem) from error


def _history(request: common_pb2.TokenRequest, num_choices: int) -> tuple[_Emitted, tuple[bool, ...]]:
    """Return (emitted, finished) by choice; both empty when nothing was emitted."""
    if not request.emitted:
        return (), ()
    choices = sorted(request.emitted, key=lambda choice: choice.index)
    indexes = [choice.index for choice in choices]
    if indexes != list(range(num_choices)):
        raise InvalidArgument("request.emitted", f"choices {indexes[:20]}; give none, or one for each of {num_choices}")
    emitted = tuple(tuple(choice.token_ids) for choice in choices)
    finished = tuple(choice.finish_reason != common_pb2.FINISH_REASON_UNSPECIFIED for choice in choices)
    if all(finished):
        raise InvalidArgument("request.emitted", "every choice has finished; there is nothing to generate")
    return emitted, finished


# The served model, as both services and the transfers need it.


@dataclass(frozen=True)
class ServedModel:
    """Describe the model that this worker serves: `identity` must be equal on both ends of a hand-off, `layout` convertible;
    `translate` makes the engine's requests."""

    identity: common_pb2.Identity
    layout: common_pb2.KVLayout
    translate: TokenRequestTranslator

    @classmethod
    def of(cls, facts: EngineFacts, model: str, grammars: Grammars | None, adapter_of: AdapterOf | None = None) -> ServedModel:
        """Return the description for a worker that serves an engine with these facts as `model`."""
        identity, layout = identity_of(facts, model), layout_of(facts)

        def cache_root(tenant: str, cache_salt: str) -> bytes:
            return cache_root_of(identity, layout.kv_dtype, tenant=tenant, cache_salt=cache_salt)

        translate = TokenRequestTranslator(identity.model, cache_root, grammars, adapter_of, lambda: identity.weights_hash)
        return cls(identity, layout, translate)

    @property
    def plain_root(self) -> bytes:
        """Return the root of the block hashes of requests without tenant and salt."""
        return self.translate.cache_root("", "")


# The grammar compiler of an engine's model.

MAX_LATE_VOCABULARY = 1 << 16
"""The largest vocabulary that is prepared at the first constraint. That takes 0.4 s at 49,000 tokens, 0.23 s of it with the GIL:
the event loop and the engine wait, once. For larger ones it comes near the time after which a router takes a stream for broken,
so these are prepared before anything is served."""


class ModelGrammars:
    """Compile constraints for an engine's model; the vocabulary is prepared at the first, because it takes 36 MB at 49,000 tokens
    and most workers never see a constraint. Thread-safe."""

    def __init__(self, facts: EngineFacts) -> None:
        """Create it; nothing is read yet."""
        self._facts = facts
        self._lock = threading.Lock()
        self._made: GrammarCompiler | None = None
        self._has_tokenizer = True  # as far as is known

    def prepare_if_large(self) -> None:
        """Prepare a large vocabulary now, before anything is served. What is wrong with it, a request with a constraint hears."""
        if self._facts.vocab_size > MAX_LATE_VOCABULARY:
            with contextlib.suppress(NoTokenizer):
                self._compiler(is_late=False)

    def known(self, kind: str, source: str | Sequence[str]) -> CompiledGrammar | None:
        """Return a grammar compiled before; None: it must be compiled. Raises ValueError if it was rejected before."""
        return None if self._made is None else self._made.known(kind, source)

    def compile(self, kind: str, source: str | Sequence[str]) -> CompiledGrammar:
        """Return the compiled grammar. Raises ValueError that says what is wrong; NoTokenizer."""
        return self._compiler(is_late=True).compile(kind, source)

    def _compiler(self, *, is_late: bool) -> GrammarCompiler:
        with self._lock:
            if self._made is None and self._has_tokenizer:
                self._made = self._make(is_late)
                self._has_tokenizer = self._made is not None
            if self._made is None:
                raise NoTokenizer
            return self._made

    def _make(self, is_late: bool) -> GrammarCompiler | None:
        began_s = time.perf_counter()
        compiler = _compiler_for(self._facts)
        if compiler is not None:
            paused = "; requests under way paused for a part of it" if is_late else ""
            took_s = time.perf_counter() - began_s
            logger.info("made the vocabulary ready for structured outputs in %.2f s%s", took_s, paused)
        return compiler


def _compiler_for(facts: EngineFacts) -> GrammarCompiler | None:
    """Return the compiler, prepared for the engine's vocabulary and end-of-sequence tokens; None when the model is no folder with
    a tokenizer (reading the tokenizer inside a .gguf file takes seconds)."""
    # They are imported only for constraints: with the libraries beneath they take 10 MB.
    from pdmesh.text.grammar import GrammarCompiler
    from pdmesh.text.tokenizer import Tokenizer

    try:
        tokenizer = Tokenizer.load(facts.model)
    except (OSError, ValueError):
        return None
    compiler = GrammarCompiler(tokenizer.to_json(), facts.vocab_size, facts.eos_token_ids)
    with contextlib.suppress(ValueError):  # compiling a constraint raises it again
        compiler.warm()
    return compiler
