"""Schemas that llguidance alone would read otherwise: the right value is possible and the wrong one is not, or the keyword is
refused by name."""

from __future__ import annotations

import json
import re

import pytest

from pdmesh.text.grammar import GrammarCompiler
from pdmesh.text.json_schema import exact_classes
from tests.text.samples import make_tokenizer

TOKENIZER = make_tokenizer("byte_level")
END = 0
LARGE = 1234567890123456789


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(TOKENIZER.to_json(), TOKENIZER.vocab_size, [END])


def _allows(compiler: GrammarCompiler, schema: object, text: str) -> bool:
    matcher = compiler.compile("json_schema", json.dumps(schema)).matcher()
    token_ids = TOKENIZER.encode(text)
    if matcher.num_possible(token_ids) < len(token_ids):
        return False
    for token_id in token_ids:
        matcher.take(token_id)
    return bool(matcher.allowed()[END // 32] >> END % 32 & 1)


@pytest.mark.parametrize("number", [LARGE, -LARGE, 2**53 + 1, 2**63, -(2**63), 2**64 - 1, 10**20, 1e20, 10**400])
@pytest.mark.parametrize("keyword", ["const", "enum", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"])
def test_numbers_that_would_not_be_kept_are_refused_by_keyword(compiler: GrammarCompiler, keyword: str, number: float) -> None:
    value = [1, {"a": number}] if keyword == "enum" else number
    for schema in ({keyword: value}, {"properties": {"const": {"anyOf": [{"type": "integer", keyword: value}]}}}):
        with pytest.raises(ValueError, match=rf"^{keyword}: .*2\^53"):
            compiler.compile("json_schema", json.dumps(schema))


def test_numbers_that_are_kept(compiler: GrammarCompiler) -> None:
    for number in (2**53, -(2**53), 2**53 - 1, 0, 7, 0.1, 1.5):
        assert _allows(compiler, {"const": number}, str(number))
    assert _allows(compiler, {"type": "integer", "maximum": 2**63 - 1}, str(2**63 - 1))
    assert not _allows(compiler, {"type": "integer", "maximum": 2**63 - 1}, str(2**63))
    assert _allows(compiler, {"type": "integer", "minimum": 0, "maximum": 2**53}, str(2**53))
    assert not _allows(compiler, {"type": "integer", "minimum": 0, "maximum": 2**53}, str(2**53 + 1))
    assert _allows(compiler, {"type": "integer", "default": LARGE, "examples": [LARGE]}, str(LARGE))


@pytest.mark.parametrize("number", [2**31, 999_983, 0.999983, 10**9, 65536 * 1000])
def test_a_multiple_that_would_be_compiled_for_minutes_is_refused(compiler: GrammarCompiler, number: float) -> None:
    with pytest.raises(ValueError, match=r"^multipleOf: .* takes too long"):
        compiler.compile("json_schema", json.dumps({"type": "number", "multipleOf": number}))
    assert _allows(compiler, {"type": "integer", "multipleOf": 10**6}, str(3 * 10**6))


@pytest.mark.parametrize(
    "pattern",
    [
        r"[\x00-\x1f]",
        r'[^"\\]',
        r"[^\\]",
        r'[^"]',
        r"[\x00-\x5b]",
        r"[^a]",
        r"[^\\\n]",
        r"[\n\t]",
        r'[^\t"]',
        r"[^\r\\]",
        r'[^\n\x01"]',
        r'[^\x0e"]',
        r"[^\x1f\\]",
        r"[ -~]",
        r"[]\x00-\x1f]",
        ".",
    ],
)
def test_a_class_allows_its_own_characters_and_no_others(compiler: GrammarCompiler, pattern: str) -> None:
    for character in '"\\\n\t\x01\x1faé[]/b':
        schema = {"type": "string", "pattern": f"^{pattern}{{2}}$"}
        expected = re.fullmatch(pattern, character) is not None
        assert _allows(compiler, schema, json.dumps(character * 2, ensure_ascii=False)) is expected, character
        assert not _allows(compiler, schema, f'"{character}{character}"') or character not in '"\\\n\t\x01\x1f'


def test_two_control_characters_are_escaped(compiler: GrammarCompiler) -> None:
    controls = {"type": "string", "pattern": r"^[\x00-\x1f]{2}$"}
    assert _allows(compiler, controls, r'"\u0001\n"') and _allows(compiler, controls, r'"\b\f"')
    assert not _allows(compiler, controls, r'"\\\n"') and not _allows(compiler, controls, '"\\\n"')
    keyed = {"type": "object", "patternProperties": {r'^[^"\\]$': {"const": 1}}, "additionalProperties": False}
    assert _allows(compiler, keyed, '{"a": 1}') and not _allows(compiler, keyed, r'{"\\": 1}')
    assert not _allows(compiler, {"type": "string", "pattern": r"^\p{Cc}$"}, r'"\\"')


@pytest.mark.parametrize("pattern", [r"^[a-z\]]+\[x\]$", r"\d[0-9]", "[^a]", r"\\[ab]", "[", "[a", "\\", r"a\[^b]", "[]a]", ""])
def test_other_patterns_stay_as_they_are(pattern: str) -> None:
    assert exact_classes(pattern) == pattern


def test_property_names_are_no_keywords(compiler: GrammarCompiler) -> None:
    schema = {
        "type": "object",
        "properties": {"pattern": {"const": "x"}, "minimum": {"const": 5}},
        "required": ["pattern", "minimum"],
    }
    assert _allows(compiler, schema, '{"pattern": "x", "minimum": 5}')
