"""Every field a client controls, checked before any worker hears of the request. Each refusal names the field."""

import re
from collections.abc import Sequence
from typing import NoReturn

from pdmesh.runtime.errors import InvalidArgument
from pdmesh.v1 import common_pb2, mesh_pb2
from router.routing.worker_snapshot import Mode

MAX_CHOICES = 16
MAX_TENANT_CHARS = 128
MAX_SALT_CHARS = 256
MAX_MESSAGES = 10_000
MAX_ROLE_CHARS = 64

_REQUEST_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
Messages = Sequence[mesh_pb2.ChatMessage]
_MODES = {
    mesh_pb2.PREFILL_MODE_UNSPECIFIED: None,
    mesh_pb2.PREFILL_MODE_LOCAL: Mode.LOCAL,
    mesh_pb2.PREFILL_MODE_REMOTE: Mode.REMOTE,
}


def refuse(field: str, problem: str) -> NoReturn:
    """Raise InvalidArgument with the field's name in the message, too."""
    raise InvalidArgument(field, f"{field}: {problem}")


def check_prompt_text(text: str, max_bytes: int, *, field: str = "prompt") -> None:
    """A text prompt: not empty, not larger than the router takes."""
    if not text:
        refuse(field, "the text is empty; send at least one character or token")
    size = len(text.encode())
    if size > max_bytes:
        refuse(field, f"the text has {size} bytes, {max_bytes} are allowed (max_prompt_bytes)")


def check_messages(messages: Messages, max_bytes: int) -> None:
    """Messages of a chat: at least one, each with a role."""
    if not messages:
        refuse("messages", "there are none; send at least one")
    if len(messages) > MAX_MESSAGES:
        refuse("messages", f"there are {len(messages)}, {MAX_MESSAGES} are allowed")
    for number, message in enumerate(messages):
        if not message.role or len(message.role) > MAX_ROLE_CHARS:
            refuse(f"messages[{number}].role", f'must have 1 to {MAX_ROLE_CHARS} characters, such as "user"')
    size = sum(len(message.content.encode()) for message in messages)
    if size > max_bytes:
        refuse("messages", f"they have {size} bytes, {max_bytes} are allowed (max_prompt_bytes)")


def check_tokens(field: str, token_ids: Sequence[int], vocab_size: int) -> None:
    """Token ids exist in the vocabulary."""
    if token_ids and max(token_ids) >= vocab_size:
        number, token_id = next((number, token_id) for number, token_id in enumerate(token_ids) if token_id >= vocab_size)
        refuse(f"{field}[{number}]", f"token id {token_id} does not exist: the vocabulary has {vocab_size}")


def check_prompt_length(num_tokens: int, max_context: int) -> None:
    """A prompt leaves room for at least one token."""
    if num_tokens == 0:
        refuse("prompt", "it has no tokens; send at least one")
    if num_tokens >= max_context:
        refuse(
            "prompt",
            f"its {num_tokens} tokens leave no room in the model's context of {max_context}; at most {max_context - 1} do",
        )


def check_can_fit(fewest_tokens: int, max_context: int) -> None:
    """A text that has too many tokens, whatever they are, is not worth tokenizing."""
    if fewest_tokens >= max_context:
        refuse(
            "prompt",
            f"its {fewest_tokens} tokens or more leave no room in the model's context of {max_context}; at most "
            f"{max_context - 1} do",
        )


def check_options(options: mesh_pb2.RequestOptions) -> None:
    """Identifiers, enumerations and lengths."""
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


def mode_of(options: mesh_pb2.RequestOptions) -> Mode | None:
    """The mode that checked options force; None: the router chooses."""
    return _MODES[options.mode]


def check_resume(
    resume: mesh_pb2.Resume, sampling: common_pb2.SamplingParams, vocab_size: int
) -> tuple[common_pb2.EmittedChoice, ...]:
    """The history of a resumed stream, one entry for each choice in order. `sampling` is complete (max_tokens, n)."""
    if sampling.HasField("seed") and sampling.seed != resume.seed:
        refuse("resume.seed", f"{resume.seed} is not the seed of sampling, {sampling.seed}; send the one that `started` named")
    choices = [common_pb2.EmittedChoice(index=index) for index in range(sampling.n)]
    seen: set[int] = set()
    for number, emitted in enumerate(resume.emitted):
        _check_emitted(f"resume.emitted[{number}]", emitted, sampling, vocab_size)
        if emitted.index in seen:
            refuse(f"resume.emitted[{number}].index", f"choice {emitted.index} is named twice")
        seen.add(emitted.index)
        choices[emitted.index] = emitted
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
