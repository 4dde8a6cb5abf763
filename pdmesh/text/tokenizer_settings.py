"""What a model folder says about its tokenizer beside tokenizer.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pdmesh.text.chat_template import select_template

_SPECIAL_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
# transformers writes int(1e30) where it does not know a tokenizer's limit.
_MAX_PLAUSIBLE_CONTEXT = 1 << 40


@dataclass(frozen=True)
class TokenizerSettings:
    """Facts of one model folder; 0, empty and None where the folder does not say."""

    vocab_size: int = 0
    max_context: int = 0
    eos_token_ids: tuple[int, ...] = ()
    chat_template: str | None = None
    special_tokens: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def load(cls, folder: str | Path) -> TokenizerSettings:
        """Of the files, each may be missing. ValueError names the one that is no JSON object or holds nonsense."""
        folder = Path(folder)
        config = _read_object(folder / "config.json")
        text_config = config.get("text_config", config)  # models that see images keep their language model one level down
        if not isinstance(text_config, dict):
            raise ValueError(f"{folder / 'config.json'}: text_config is not an object")
        tokenizer_config = _read_object(folder / "tokenizer_config.json")
        generation_config = _read_object(folder / "generation_config.json")
        return cls(
            vocab_size=_number(text_config.get("vocab_size")),
            max_context=_number(text_config.get("max_position_embeddings")) or _number(tokenizer_config.get("model_max_length")),
            eos_token_ids=_ids(generation_config.get("eos_token_id")) or _ids(text_config.get("eos_token_id")),
            chat_template=_chat_template(folder, tokenizer_config),
            special_tokens=_special_tokens(tokenizer_config, _read_object(folder / "special_tokens_map.json")),
        )


def _read_object(path: Path) -> dict[str, object]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is no JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} is no JSON object")
    return value


def _number(value: object) -> int:
    return value if isinstance(value, int) and 0 < value < _MAX_PLAUSIBLE_CONTEXT else 0


def _ids(value: object) -> tuple[int, ...]:
    """eos_token_id is a number, a list of them, or null."""
    values = value if isinstance(value, list) else [value]
    return tuple(item for item in values if isinstance(item, int))


def _chat_template(folder: Path, tokenizer_config: Mapping[str, object]) -> str | None:
    """A chat_template.jinja beats tokenizer_config.json, as in transformers."""
    separate = folder / "chat_template.jinja"
    if separate.is_file():
        return separate.read_text(encoding="utf-8")
    return select_template(tokenizer_config.get("chat_template"))


def _special_tokens(*sources: Mapping[str, object]) -> dict[str, str]:
    """Names such as "bos_token" with their content; the first source that has one counts."""
    tokens: dict[str, str] = {}
    for source in sources:
        for name in _SPECIAL_TOKEN_NAMES:
            declared = source.get(name)
            content = declared.get("content") if isinstance(declared, dict) else declared
            if isinstance(content, str):
                tokens.setdefault(name, content)
    return tokens
