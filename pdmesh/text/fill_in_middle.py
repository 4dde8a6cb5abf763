"""Prompts of models that fill a gap between two texts, by the tokens that they were trained with (Bavarian et al., Efficient
Training of Language Models to Fill in the Middle, 2022). All of these models read prefix, suffix, then write the middle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pdmesh.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class GapTokens:
    """Hold the texts of the tokens before the prefix, before the suffix and before the middle; `ends`: tokens that end a middle,
    besides those that end every output."""

    prefix: str
    suffix: str
    middle: str
    ends: tuple[str, ...] = ()


_ENDS = ("<|endoftext|>", "<|fim_pad|>", "<|file_sep|>", "<|repo_name|>", "<|file_separator|>")
GAP_TOKENS = (
    # Qwen2.5-Coder (Hui et al., 2024) and CodeGemma (2024)
    GapTokens("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", _ENDS),
    # StarCoder (Li et al., 2023) and StarCoder2, Granite Code, Stable Code
    GapTokens("<fim_prefix>", "<fim_suffix>", "<fim_middle>", ("<|endoftext|>", "<file_sep>", "<fim_pad>")),
    # SantaCoder (Ben Allal et al., 2023)
    GapTokens("<fim-prefix>", "<fim-suffix>", "<fim-middle>", ("<|endoftext|>", "<fim-pad>")),
    # DeepSeek-Coder (Guo et al., 2024) and DeepSeek-Coder-V2: the third token stands between suffix and middle
    GapTokens("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    # Code Llama (Rozière et al., 2023), 7B and 13B
    GapTokens("▁<PRE>", "▁<SUF>", "▁<MID>", ("▁<EOT>",)),
    # GLM-4.5 (2025)
    GapTokens("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),
)


@dataclass(frozen=True)
class Gap:
    """Hold the same tokens as ids of one tokenizer; `lead`: what it puts before every text; `stops`: tokens that end a middle."""

    lead: tuple[int, ...]
    prefix: int
    suffix: int
    middle: int
    stops: tuple[int, ...]

    def prompt(self, before: Sequence[int], after: Sequence[int]) -> list[int]:
        """Return the prompt of which the output goes between `before` and `after`."""
        return [*self.lead, self.prefix, *before, self.suffix, *after, self.middle]


def gap_of(tokenizer: Tokenizer) -> Gap | None:
    """Return how a model is asked for a middle; None where its tokenizer has no tokens for that."""
    for names in GAP_TOKENS:
        ids = [tokenizer.token_id(name) for name in (names.prefix, names.suffix, names.middle)]
        prefix, suffix, middle = ids
        if prefix is None or suffix is None or middle is None:
            continue
        ends = [token_id for name in names.ends if (token_id := tokenizer.token_id(name)) is not None]
        stops = dict.fromkeys((*ends, prefix, suffix, middle))
        return Gap(_lead(tokenizer), prefix, suffix, middle, tuple(stops))
    return None


def _lead(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the tokens that the model wants before every text, such as beginning-of-sequence."""
    plain, whole = tokenizer.encode("a", add_special_tokens=False), tokenizer.encode("a")
    starts = range(len(whole) - len(plain) + 1)
    start = next((at for at in starts if whole[at : at + len(plain)] == plain), 0)
    return tuple(whole[:start])
