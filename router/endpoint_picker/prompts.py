"""What a request's body says of its prompt: names of the blocks of its text, its length, its output. Pure.

The text is hashed, not its tokens: to tokenize 2 000 tokens takes longer than everything else that a picker does, and the pool's
tokenizer may be unknown. Two prompts that begin with the same text have the same first blocks; a block's name covers all before
it, the model (so that adapters do not share), and the request's `cache_salt`, as in vLLM.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b

TYPICAL_OUTPUT = 128
MAX_OUTPUT = 1 << 20
_HASH_BYTES = 8
_BEFORE = ("tools", "system", "instructions")  # templates put these before the messages
_PROMPTS = ("messages", "prompt", "input")
_LIMITS = ("max_completion_tokens", "max_tokens", "max_output_tokens")


@dataclass(frozen=True)
class Prompt:
    """Hold what matters of one request. `blocks`: names of the whole blocks of its text, in order, each of some `block_tokens`;
    `num_tokens`: estimated; `expected_tokens` of output, of `num_choices` choices."""

    model: str = ""
    blocks: tuple[int, ...] = ()
    num_tokens: int = 1
    block_tokens: float = 1.0
    expected_tokens: int = TYPICAL_OUTPUT
    num_choices: int = 1


NO_PROMPT = Prompt()


def prompt_of(body: bytes, block_bytes: int, bytes_per_token: int) -> Prompt:
    """Return the prompt of an HTTP body: chat, completions, responses, messages or embeddings. One that is none of them has no
    blocks: it is placed by load, and the endpoint says what is wrong with it."""
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):
        return Prompt(num_tokens=max(1, len(body) // bytes_per_token))
    if not isinstance(fields, dict):
        return Prompt(num_tokens=max(1, len(body) // bytes_per_token))
    text, num_ids = _text_of(fields)
    model, salt = fields.get("model"), fields.get("cache_salt")
    scope = json.dumps([model if isinstance(model, str) else "", salt if isinstance(salt, str) else ""])
    return Prompt(
        model=model if isinstance(model, str) else "",
        blocks=block_names(text, scope.encode(), block_bytes),
        num_tokens=max(1, num_ids or len(text) // bytes_per_token),
        block_tokens=block_bytes * (num_ids / len(text) if num_ids else 1 / bytes_per_token),
        expected_tokens=_expected(fields),
        num_choices=_count(fields.get("n"), 1, 128),
    )


def block_names(text: bytes, scope: bytes, block_bytes: int) -> tuple[int, ...]:
    """Return the names of the whole blocks of a text, each a hash of the block and of the name before it."""
    names: list[int] = []
    before = blake2b(scope, digest_size=_HASH_BYTES).digest()
    for start in range(0, len(text) - block_bytes + 1, block_bytes):
        before = blake2b(before + text[start : start + block_bytes], digest_size=_HASH_BYTES).digest()
        names.append(int.from_bytes(before, "little"))
    return tuple(names)


def _text_of(fields: Mapping[str, object]) -> tuple[bytes, int]:
    """Return the text, and the number of token ids where the prompt is a list of these; 0 otherwise."""
    name = next((name for name in _PROMPTS if fields.get(name) is not None), None)
    if name is None:
        return b"", 0
    prompt = fields[name]
    parts = [_written(fields[each]) for each in _BEFORE if fields.get(each)]
    ids = prompt if isinstance(prompt, list) and prompt and isinstance(prompt[0], int) else ()
    parts.append(prompt if isinstance(prompt, str) else _written(prompt).rstrip("]"))  # so that a longer list begins the same
    return "".join(parts).encode("utf-8", "surrogatepass"), len(ids)


def _written(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _expected(fields: Mapping[str, object]) -> int:
    limits = [fields[name] for name in _LIMITS if isinstance(fields.get(name), int)]
    return min(TYPICAL_OUTPUT, _count(limits[0], 1, MAX_OUTPUT)) if limits else TYPICAL_OUTPUT


def _count(value: object, least: int, most: int) -> int:
    return min(most, max(least, value)) if isinstance(value, int) else least
