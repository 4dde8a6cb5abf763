"""Checks of every field that a client controls, made before any worker sees the request. Each error names the field."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NoReturn

from pdmesh.runtime.errors import CONTEXT_OVERFLOW, InvalidArgument
from pdmesh.runtime.work_threads import WorkThreads
from pdmesh.sampling_params import MAX_BIASES, NUMBERS, PARAMETERS, Kind, Parameter
from pdmesh.text.grammar import CompiledGrammar, GrammarCompiler
from pdmesh.v1 import common_pb2, mesh_pb2
from router.routing.worker_snapshot import Mode

MAX_TENANT_CHARS = 128
MAX_SALT_CHARS = 256
MAX_MESSAGES = 10_000
MAX_ROLE_CHARS = 64
MAX_RETENTION_S = 86_400
MAX_PRIORITY_HINT = 1000

_REQUEST_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
_SESSION_ID = re.compile(r"[!-~]{1,256}")
Messages = Sequence[mesh_pb2.ChatMessage]
_MODES = {
    mesh_pb2.PREFILL_MODE_UNSPECIFIED: None,
    mesh_pb2.PREFILL_MODE_LOCAL: Mode.LOCAL,
    mesh_pb2.PREFILL_MODE_REMOTE: Mode.REMOTE,
}


def refuse(field: str, problem: str) -> NoReturn:
    """Raise InvalidArgument with the field's name also in the message."""
    raise InvalidArgument(field, f"{field}: {problem}")


class ContextOverflow(InvalidArgument):
    """Report a prompt that, with its output, is longer than the model's context, in the words that clients of OpenAI's API look
    for. `num_output`: tokens that were asked for, 1 where the request leaves them open. `is_lower_bound`: the prompt has been
    measured without tokenizing it, and has `num_prompt` tokens or more."""

    def __init__(self, field: str, num_prompt: int, num_output: int, max_context: int, *, is_lower_bound: bool = False) -> None:
        self.num_prompt = num_prompt
        self.num_output = num_output
        self.max_context = max_context
        self.is_lower_bound = is_lower_bound
        super().__init__(field, f"{field}: {self.words('prompt')}")
        self.reason = CONTEXT_OVERFLOW

    def told(self, field: str, prompt: str) -> "ContextOverflow":
        """Return the same error about a client's `field`, as `words` says it."""
        told = ContextOverflow(field, self.num_prompt, self.num_output, self.max_context, is_lower_bound=self.is_lower_bound)
        told.message = self.words(prompt)
        return told

    def words(self, prompt: str) -> str:
        """Return the message without the field; `prompt` is what the client calls its prompt."""
        at_least = "at least " if self.is_lower_bound else ""
        return (
            f"This model's maximum context length is {self.max_context} tokens. However, you requested "
            f"{at_least}{self.num_prompt + self.num_output} tokens "
            f"({at_least}{self.num_prompt} in the {prompt}, {self.num_output} in the completion). "
            f"Please reduce the length of the {prompt} or completion."
        )


def _refuse_size(field: str, problem: str) -> NoReturn:
    error = InvalidArgument(field, f"{field}: {problem}")
    error.reason = CONTEXT_OVERFLOW
    raise error


def check_prompt_text(text: str, max_bytes: int, *, field: str = "prompt") -> None:
    """Refuse a text prompt that is empty or larger than the router takes."""
    if not text:
        refuse(field, "the text is empty; send at least one character or token")
    size = len(text.encode())
    if size > max_bytes:
        _refuse_size(field, f"the text has {size} bytes, {max_bytes} are allowed (max_prompt_bytes)")


def check_messages(messages: Messages, max_bytes: int) -> None:
    """Refuse a chat without messages, with a message without a role, or with too much text."""
    if not messages:
        refuse("messages", "there are none; send at least one")
    if len(messages) > MAX_MESSAGES:
        refuse("messages", f"there are {len(messages)}, {MAX_MESSAGES} are allowed")
    for number, message in enumerate(messages):
        if not message.role or len(message.role) > MAX_ROLE_CHARS:
            refuse(f"messages[{number}].role", f'must have 1 to {MAX_ROLE_CHARS} characters, such as "user"')
    size = sum(len(message.content.encode()) for message in messages)
    if size > max_bytes:
        _refuse_size("messages", f"they have {size} bytes, {max_bytes} are allowed (max_prompt_bytes)")


def check_tokens(field: str, token_ids: Sequence[int], vocab_size: int) -> None:
    """Refuse token ids that are not in the vocabulary."""
    if token_ids and max(token_ids) >= vocab_size:
        number, token_id = next((number, token_id) for number, token_id in enumerate(token_ids) if token_id >= vocab_size)
        refuse(f"{field}[{number}]", f"token id {token_id} does not exist: the vocabulary has {vocab_size}")


def check_prompt_length(num_tokens: int, max_context: int, max_tokens: int = 1) -> None:
    """Refuse a prompt that is empty or leaves no room for a token. `max_tokens`: what the request asks for, 1 where it leaves it
    open."""
    if num_tokens == 0:
        refuse("prompt", "it has no tokens; send at least one")
    if num_tokens >= max_context:
        raise ContextOverflow("prompt", num_tokens, max(1, max_tokens), max_context)


def check_can_fit(fewest_tokens: int, max_context: int) -> None:
    """Refuse a text that has too many tokens under any tokenization, before it is tokenized."""
    if fewest_tokens >= max_context:
        raise ContextOverflow("prompt", fewest_tokens, 1, max_context, is_lower_bound=True)


def check_options(options: mesh_pb2.RequestOptions) -> None:
    """Check identifiers, enumerations and lengths."""
    if options.request_id and not _REQUEST_ID.fullmatch(options.request_id):
        refuse("options.request_id", f"{options.request_id[:80]!r} is not 1 to 64 of [A-Za-z0-9_-]")
    if len(options.tenant) > MAX_TENANT_CHARS:
        refuse("options.tenant", f"has {len(options.tenant)} characters, {MAX_TENANT_CHARS} are allowed")
    if len(options.cache_salt) > MAX_SALT_CHARS:
        refuse("options.cache_salt", f"has {len(options.cache_salt)} characters, {MAX_SALT_CHARS} are allowed")
    if options.priority not in common_pb2.Priority.values():
        refuse("options.priority", f"{options.priority} is none of {', '.join(common_pb2.Priority.keys())}")
    if options.mode not in _MODES:
        refuse("options.mode", f"{options.mode} is none of {', '.join(mesh_pb2.PrefillMode.keys())}")
    _check_session(options)


def _check_session(options: mesh_pb2.RequestOptions) -> None:
    if options.session_id:
        check_session_id("options.session_id", options.session_id)
    elif options.session_final:
        refuse("options.session_final", "there is no session that could end; send its session_id, too")
    if options.kv_retention_s > MAX_RETENTION_S:
        refuse("options.kv_retention_s", f"{options.kv_retention_s} is more than {MAX_RETENTION_S} seconds, which are a day")
    if abs(options.priority_hint) > MAX_PRIORITY_HINT:
        refuse("options.priority_hint", f"{options.priority_hint} is not from -{MAX_PRIORITY_HINT} to {MAX_PRIORITY_HINT}")


def is_session_id(text: str) -> bool:
    """Return whether `text` can name a session: 1 to 256 printable ASCII characters without spaces."""
    return bool(_SESSION_ID.fullmatch(text))


def check_session_id(field: str, text: str) -> None:
    """Refuse what cannot name a session. The error does not repeat it: ids of sessions are kept out of logs."""
    if not is_session_id(text):
        refuse(field, f"its {len(text)} characters are not 1 to 256 printable ones of ASCII without spaces")


def mode_of(options: mesh_pb2.RequestOptions) -> Mode | None:
    """Return the mode that checked options force; None: the router chooses."""
    return _MODES[options.mode]


MAX_FINGERPRINT_CHARS = 64


def check_resume(
    resume: mesh_pb2.Resume, sampling: common_pb2.SamplingParams, vocab_size: int
) -> tuple[common_pb2.EmittedChoice, ...]:
    """Return the history of a resumed stream, one entry for each choice in order. `sampling` is complete (max_tokens, n)."""
    if sampling.HasField("seed") and sampling.seed != resume.seed:
        refuse("resume.seed", f"{resume.seed} is not the seed of sampling, {sampling.seed}; send the one that `started` named")
    if len(resume.system_fingerprint) > MAX_FINGERPRINT_CHARS:
        refuse("resume.system_fingerprint", f"has {len(resume.system_fingerprint)} characters; send the one that a delta named")
    choices = [common_pb2.EmittedChoice(index=index) for index in range(sampling.n)]
    seen: set[int] = set()
    for number, emitted in enumerate(resume.emitted):
        _check_emitted(f"resume.emitted[{number}]", emitted, sampling, vocab_size)
        if emitted.index in seen:
            refuse(f"resume.emitted[{number}].index", f"choice {emitted.index} is named twice")
        seen.add(emitted.index)
        choices[emitted.index].CopyFrom(emitted)
        if emitted.finish_reason == common_pb2.FINISH_REASON_TOOL_CALLS:  # a client's name of it, which workers do not know
            choices[emitted.index].finish_reason = common_pb2.FINISH_REASON_STOP
    return tuple(choices)


def _check_emitted(field: str, emitted: common_pb2.EmittedChoice, sampling: common_pb2.SamplingParams, vocab_size: int) -> None:
    if emitted.index >= sampling.n:
        refuse(f"{field}.index", f"choice {emitted.index} does not exist: sampling.n is {sampling.n}")
    if emitted.finish_reason not in common_pb2.FinishReason.values():
        refuse(f"{field}.finish_reason", f"{emitted.finish_reason} is none of {', '.join(common_pb2.FinishReason.keys())}")
    if emitted.finish_reason and not emitted.token_ids:
        refuse(f"{field}.finish_reason", "the choice has no tokens, so it cannot have ended")
    if len(emitted.token_ids) > sampling.max_tokens:
        refuse(f"{field}.token_ids", f"{len(emitted.token_ids)} tokens are more than max_tokens, {sampling.max_tokens}")
    check_tokens(f"{field}.token_ids", emitted.token_ids, vocab_size)


# Sampling parameters of a client: checked, completed, and split into what workers get and what the router keeps (stop strings).

MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 1000
MAX_STOP_TOKENS = 256
MAX_PROMPT_LOGPROBS = 1 << 18
"""Bounds the log-probabilities of a prompt's tokens and of their alternatives: they come in one message."""

_FIELDS = common_pb2.SamplingParams.DESCRIPTOR.fields_by_name
_COUNTS = tuple(parameter for parameter in PARAMETERS if parameter.kind is Kind.COUNT)
_BIAS = next(parameter for parameter in PARAMETERS if parameter.kind is Kind.BIASES)


@dataclass(frozen=True)
class Limits:
    """Hold what the model allows. `room`: tokens of context that the prompt leaves, at least 1. `defaults`: what its publisher
    set for parameters that a request leaves out. `num_prompt`: tokens of the prompt. `clips`: more max_tokens than there is room
    for mean the room."""

    vocab_size: int
    eos_token_ids: frozenset[int]
    room: int
    defaults: Mapping[str, float] = field(default_factory=dict)
    num_prompt: int = 0
    clips: bool = False

    def max_tokens(self, sampling: common_pb2.SamplingParams) -> int:
        """Return what a request asks for; without a wish, or where it is clipped, the room."""
        if not sampling.HasField("max_tokens"):
            return self.room
        return min(sampling.max_tokens, self.room) if self.clips else sampling.max_tokens


def complete(sampling: common_pb2.SamplingParams, limits: Limits) -> common_pb2.SamplingParams:
    """Return a checked copy with n, max_tokens and the model's own defaults set and without stop strings; the seed is unchanged.
    Raises InvalidArgument."""
    _check_numbers(sampling)
    _check_lengths(sampling, limits)
    _check_stops(sampling, limits)
    _check_biases(sampling.logit_bias, limits)
    checked = common_pb2.SamplingParams()
    checked.CopyFrom(sampling)
    checked.ClearField("stop")
    checked.n = sampling.n or 1
    for name, value in limits.defaults.items():
        if not sampling.HasField(name):  # type: ignore[arg-type]
            setattr(checked, name, value)
    checked.max_tokens = limits.max_tokens(sampling)
    return checked


def _check_numbers(sampling: common_pb2.SamplingParams) -> None:
    for parameter in NUMBERS:
        if not math.isfinite(getattr(sampling, parameter.name)):
            refuse(f"sampling.{parameter.name}", f"{getattr(sampling, parameter.name)} is not a finite number")
    for parameter in NUMBERS:
        _check_range(parameter, sampling)


def _check_range(parameter: Parameter, sampling: common_pb2.SamplingParams) -> None:
    """Absent means the default, which needs no check."""
    name = parameter.name
    if _FIELDS[name].has_presence and not sampling.HasField(name):  # type: ignore[arg-type]
        return
    problem = parameter.refusal(getattr(sampling, name))
    if problem is not None:
        refuse(f"sampling.{name}", problem)


def _check_lengths(sampling: common_pb2.SamplingParams, limits: Limits) -> None:
    max_tokens = limits.max_tokens(sampling)
    if max_tokens < 1:
        refuse("sampling.max_tokens", "must be at least 1; leave it out for what is left of the context")
    if max_tokens > limits.room:
        raise ContextOverflow("sampling.max_tokens", limits.num_prompt, max_tokens, limits.num_prompt + limits.room)
    if sampling.min_tokens > max_tokens:
        refuse("sampling.min_tokens", f"{sampling.min_tokens} is more than max_tokens, {max_tokens}")
    for parameter in _COUNTS:
        _check_range(parameter, sampling)
    num_logprobs = limits.num_prompt * (sampling.prompt_logprobs + 1) if sampling.HasField("prompt_logprobs") else 0
    if num_logprobs > MAX_PROMPT_LOGPROBS:
        most = f"at most {MAX_PROMPT_LOGPROBS} are given; ask for fewer alternatives, or in parts"
        refuse("sampling.prompt_logprobs", f"{limits.num_prompt} tokens with {sampling.prompt_logprobs} alternatives: {most}")


def _check_stops(sampling: common_pb2.SamplingParams, limits: Limits) -> None:
    if len(sampling.stop) > MAX_STOP_STRINGS:
        refuse("sampling.stop", f"{len(sampling.stop)} strings are more than {MAX_STOP_STRINGS}")
    for number, stop in enumerate(sampling.stop):
        if not 1 <= len(stop) <= MAX_STOP_CHARS:
            refuse(f"sampling.stop[{number}]", f"has {len(stop)} characters; 1 to {MAX_STOP_CHARS} are allowed")
    if len(sampling.stop_token_ids) > MAX_STOP_TOKENS:
        refuse("sampling.stop_token_ids", f"{len(sampling.stop_token_ids)} tokens are more than {MAX_STOP_TOKENS}")
    check_tokens("sampling.stop_token_ids", sampling.stop_token_ids, limits.vocab_size)
    contradiction = limits.eos_token_ids.intersection(sampling.stop_token_ids)
    if sampling.ignore_eos and contradiction:
        refuse(
            "sampling.stop_token_ids", f"{min(contradiction)} ends every sequence, which ignore_eos forbids; drop one of the two"
        )


def _check_biases(biases: Sequence[common_pb2.TokenBias], limits: Limits) -> None:
    """The errors name the token: clients send a map by token ids."""
    field, allowed = "sampling.logit_bias", _BIAS.rules.computed
    if len(biases) > MAX_BIASES:
        refuse(field, f"{len(biases)} tokens are more than {MAX_BIASES}")
    seen: set[int] = set()
    for each in biases:
        if each.token_id in seen:
            refuse(field, f"token {each.token_id} is named twice")
        if each.token_id >= limits.vocab_size:
            refuse(field, f"token id {each.token_id} does not exist: the vocabulary has {limits.vocab_size}")
        if allowed is not None and each.bias not in allowed:
            refuse(field, f"{each.bias:g} of token {each.token_id} is not {allowed}")
        seen.add(each.token_id)


# A client's constraint on its output, compiled before any worker sees the request.


# A pool of its own, so that a hostile grammar blocks one of these threads for a while, and nothing else.
threads = WorkThreads("grammar", num_threads=2, max_waiting=64, timeout_s=5.0)


async def compile_constraint(grammars: GrammarCompiler, sampling: common_pb2.SamplingParams) -> CompiledGrammar | None:
    """Return the compiled grammar of a request; None if it has no constraint. Raises InvalidArgument."""
    if not sampling.HasField("constraint"):
        return None
    kind = sampling.constraint.WhichOneof("kind")
    if kind is None:
        refuse("sampling.constraint", "is empty; give one of json_schema, regex, choice and grammar")
    for name in ("min_tokens", "ignore_eos"):
        if getattr(sampling, name):
            refuse(f"sampling.{name}", "excludes a constraint, whose output ends when it is complete; drop one of the two")
    source = tuple(sampling.constraint.choice.values) if kind == "choice" else str(getattr(sampling.constraint, kind))
    field = f"sampling.constraint.{kind}"
    try:
        return grammars.known(kind, source) or await threads.run(partial(grammars.compile, kind, source))
    except TimeoutError:
        refuse(field, f"takes more than {threads.timeout_s:.0f} s to compile; make it simpler")
    except ValueError as error:
        refuse(field, str(error))


async def check_history(grammar: CompiledGrammar, emitted: Sequence[common_pb2.EmittedChoice]) -> None:
    """Check that the tokens from which a client resumes are a prefix of a sentence of the grammar. Raises InvalidArgument."""
    open_choices = [(number, choice) for number, choice in enumerate(emitted) if not choice.finish_reason]

    def find() -> tuple[int, int] | None:
        strays = ((number, grammar.first_stray(choice.token_ids)) for number, choice in open_choices)
        return next(((number, index) for number, index in strays if index is not None), None)

    try:
        stray = await threads.run(find)
    except TimeoutError:
        refuse("resume.emitted", f"takes more than {threads.timeout_s:.0f} s to compare with sampling.constraint")
    if stray is not None:
        number, index = stray
        token_id = emitted[number].token_ids[index]
        refuse(f"resume.emitted[{number}].token_ids[{index}]", f"token {token_id} does not follow sampling.constraint")
