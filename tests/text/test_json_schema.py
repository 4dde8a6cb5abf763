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


@pytest.mark.parametrize(
    "text", ["0.1234567890123456789", "-123456.12345678901234", "1e-400", "1" * 20 + "e-9999999999999999999"]
)
@pytest.mark.parametrize("keyword", ["const", "enum", "minimum", "multipleOf"])
def test_digits_that_would_not_be_kept_are_refused_by_keyword(compiler: GrammarCompiler, keyword: str, text: str) -> None:
    value = f"[{text}]" if keyword == "enum" else text
    with pytest.raises(ValueError, match=rf"^{keyword}: {re.escape(text)[:30]}.* 17 digits"):
        compiler.compile("json_schema", f'{{"type": "number", "{keyword}": {value}}}')


@pytest.mark.parametrize(("text", "written"), [("0.10000000000000001", "0.1"), ("1.50000000000000000000", "1.5"), ("0e-5", "0")])
def test_digits_that_say_which_double_is_meant_are_kept(compiler: GrammarCompiler, text: str, written: str) -> None:
    matcher = compiler.compile("json_schema", f'{{"const": {text}}}').matcher()
    tokens = TOKENIZER.encode(written)
    assert matcher.num_possible(tokens) == len(tokens)


def test_schemas_within_lark_grammars_are_read_rightly(compiler: GrammarCompiler) -> None:
    with pytest.raises(ValueError, match=r"^const: .*2\^53"):
        compiler.compile("grammar", f'start: "a" %json {{"const": {LARGE}}}')
    pattern = json.dumps({"type": "string", "pattern": r'^[^"\\]{2}$'})
    said = json.dumps({"const": LARGE})
    source = f"start: {json.dumps('%json ' + said)} inner // %json {said}\ninner: /%json x/ %json {pattern}"
    matcher = compiler.compile("grammar", source).matcher()
    tokens = TOKENIZER.encode(f'%json {said}%json x"ab"')
    assert matcher.num_possible(tokens) == len(tokens)
    wrong = TOKENIZER.encode(f"%json {said}%json x" + r'"\\\""')
    assert matcher.num_possible(wrong) < len(wrong)


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


@pytest.mark.parametrize(
    "pattern",
    [r"[\x00-\x0f]|[\x10-\x1f]", r"\x00|[\x01-\x1f]", r"[\x00-\x10]|q|[\x0b-\x1f]", r"[\x00-\x0f]|[\x10-\x21]", r"[a-z]|[^a]|\n"],
)
def test_alternatives_allow_their_own_characters_and_no_others(compiler: GrammarCompiler, pattern: str) -> None:
    for character in '"\\\n\t\x01\x1faqé!':
        schema = {"type": "string", "pattern": f"^({pattern})$"}
        expected = re.fullmatch(pattern, character) is not None
        assert _allows(compiler, schema, json.dumps(character, ensure_ascii=False)) is expected, character


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
