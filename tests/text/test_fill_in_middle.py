"""Prompts around a gap: which models can, and what they are asked."""

from __future__ import annotations

from pathlib import Path

import pytest
import tokenizers
from tokenizers import AddedToken, processors

from pdmesh.text.fill_in_middle import GAP_TOKENS, GapTokens, gap_of
from pdmesh.text.tokenizer import Tokenizer
from tests.support.tiny_models import write_byte_tokenizer


def _with_tokens(folder: Path, *names: str, begin: str = "") -> Tokenizer:
    """The byte tokenizer and these tokens, none of them special, as with Qwen2.5-Coder; texts start with `begin`."""
    write_byte_tokenizer(folder)
    path = str(folder / "tokenizer.json")
    backend = tokenizers.Tokenizer.from_file(path)
    backend.add_tokens([AddedToken(name, special=False, normalized=False) for name in names])
    if begin:
        pairs = [(begin, backend.token_to_id(begin))]
        backend.post_processor = processors.TemplateProcessing(single=f"{begin} $A", special_tokens=pairs)
    backend.save(path)
    return Tokenizer.load(folder)


@pytest.mark.parametrize("names", GAP_TOKENS, ids=lambda names: names.prefix)
def test_every_family(tmp_path: Path, names: GapTokens) -> None:
    tokenizer = _with_tokens(tmp_path, names.prefix, names.suffix, names.middle, *names.ends)
    gap = gap_of(tokenizer)
    assert gap is not None
    before, after = tokenizer.encode("def f("), tokenizer.encode("return a")
    text = tokenizer.decode(gap.prompt(before, after), skip_special_tokens=False)
    assert text == f"{names.prefix}def f({names.suffix}return a{names.middle}"
    assert {tokenizer.decode([stop], skip_special_tokens=False) for stop in gap.stops} == {
        names.prefix, names.suffix, names.middle, *names.ends,
    }  # fmt: skip


def test_what_a_text_begins_with_goes_first(tmp_path: Path) -> None:
    names = GAP_TOKENS[0]
    tokenizer = _with_tokens(tmp_path, names.prefix, names.suffix, names.middle, begin="<|im_start|>")
    gap = gap_of(tokenizer)
    assert gap is not None and tokenizer.decode(gap.lead, skip_special_tokens=False) == "<|im_start|>"
    assert gap.prompt([70], [71]) == [*gap.lead, gap.prefix, 70, gap.suffix, 71, gap.middle]


def test_other_models_have_none(tmp_path: Path) -> None:
    names = GAP_TOKENS[1]
    assert gap_of(_with_tokens(tmp_path, names.prefix, names.suffix)) is None
