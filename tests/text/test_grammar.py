"""Constraints: what is refused, what hostile ones cost, and that a place in a grammar depends on the tokens alone."""

from __future__ import annotations

import gc
import json
import random
import re
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path

import jsonschema
import llguidance
import numpy as np
import pytest

from pdmesh.models.catalogue import SMOLLM2, cache_folder, is_complete
from pdmesh.text import grammar as grammar_module
from pdmesh.text.grammar import MAX_BYTES, CompiledGrammar, GrammarCompiler, GrammarMatcher
from pdmesh.text.tokenizer import Tokenizer
from tests.support.tiny_models import IM_END, VOCAB_SIZE, write_byte_tokenizer

REAL = cache_folder() / "models" / SMOLLM2.name
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 12},
        "colour": {"enum": ["red", "green", "grün 日本"]},
        "sizes": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 300}, "maxItems": 3},
        "married": {"type": "boolean"},
    },
    "required": ["name", "colour", "sizes", "married"],
    "additionalProperties": False,
}
Source = str | Sequence[str]
KINDS: list[tuple[str, Source, str]] = [  # with a regular expression that every output matches
    ("json_schema", json.dumps(PERSON), r'\{"name": .*\}'),
    ("regex", r"[0-9]{3}-(abc|abd)+", r"[0-9]{3}-(abc|abd)+"),
    ("choice", ("yes", "no", 'a "quoted"\nline\\', "日本語"), r'yes|no|a "quoted"\nline\\|日本語'),
    ("grammar", 'start: "<" item ("," item)* ">"\nitem: /[a-c]{1,3}/ | "(" item ")"', r"<[a-c(),]+>"),
]


@pytest.fixture(scope="module", params=["bytes", pytest.param("smollm2", marks=pytest.mark.real_model)])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    if request.param == "smollm2":
        if not is_complete(REAL, SMOLLM2.sha256):
            pytest.skip("SmolLM2 is not in the cache; `make model` fetches it")
        return Tokenizer.load(REAL)
    folder = tmp_path_factory.mktemp("bytes")
    write_byte_tokenizer(folder)
    return Tokenizer.load(folder)


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    return compiler_of(tokenizer)


@pytest.fixture(scope="module")
def of_bytes(tmp_path_factory: pytest.TempPathFactory) -> GrammarCompiler:
    folder = tmp_path_factory.mktemp("bytes")
    write_byte_tokenizer(folder)
    return compiler_of(Tokenizer.load(folder))


def compiler_of(tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer.to_json(), max(tokenizer.vocab_size, VOCAB_SIZE), tokenizer.eos_token_ids or {IM_END})


def allowed(matcher: GrammarMatcher) -> list[int]:
    return np.flatnonzero(np.unpackbits(matcher.allowed().view(np.uint8), bitorder="little")).tolist()


def walk(compiler: GrammarCompiler, kind: str, source: Source, seed: int) -> list[int]:
    """A random output of at most 300 tokens, its end included; every place on it is looked at from a fresh matcher, too."""
    grammar, chance = compiler.compile(kind, source), random.Random(seed)
    matcher, output = grammar.matcher(), list[int]()
    while len(output) < 300:
        again = grammar.matcher()
        for token_id in output:
            again.take(token_id)
        choices = allowed(matcher)
        assert allowed(again) == choices
        assert again.forced == matcher.forced
        assert matcher.forced is None or choices == [matcher.forced]
        output.append(chance.choice(choices))
        if output[-1] in compiler.eos_token_ids:
            break
        matcher.take(output[-1])
        assert not matcher.failed
    return output


@pytest.mark.parametrize(("kind", "source", "pattern"), KINDS, ids=[kind for kind, _, _ in KINDS])
def test_how_far_a_guess_may_come(kind: str, source: Source, pattern: str, compiler: GrammarCompiler) -> None:
    """Nothing that could be drawn is refused, and what is refused could not be taken."""
    grammar, chance, num_cut = compiler.compile(kind, source), random.Random(1), 0
    for seed in range(4):
        output = [token_id for token_id in walk(compiler, kind, source, seed) if token_id not in compiler.eos_token_ids]
        assert grammar.matcher().num_possible(output) == len(output)
        for start in range(0, len(output), 5):
            here = grammar.matcher()
            for token_id in output[:start]:
                here.take(token_id)
            guess = [*output[start : start + 3], chance.randrange(compiler.vocab_size - 64), *output[start : start + 3]]
            num = here.num_possible(guess)
            num_cut += num < len(guess)
            assert num >= min(3, len(output) - start)
            for token_id in guess[:num]:
                here.take(token_id)
                assert not here.failed
            if num < len(guess):
                assert guess[num] not in allowed(here)
    assert num_cut


@pytest.mark.parametrize(("kind", "source", "pattern"), KINDS, ids=[kind for kind, _, _ in KINDS])
def test_every_output_is_a_sentence(
    kind: str, source: Source, pattern: str, compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    num_complete = 0
    for seed in range(8):
        output = walk(compiler, kind, source, seed)
        text = tokenizer.decode(output)
        if output[-1] in compiler.eos_token_ids:
            num_complete += 1
            assert re.fullmatch(pattern, text, re.DOTALL), text
            if kind == "json_schema":
                jsonschema.validate(json.loads(text), PERSON)
    assert num_complete >= 4


def test_forced_runs_end_where_there_is_a_choice(of_bytes: GrammarCompiler) -> None:
    matcher = of_bytes.compile("json_schema", json.dumps(PERSON)).matcher()
    forced = bytearray()
    while (token := matcher.forced) is not None:
        forced += bytes([token])  # the byte tokenizer numbers bytes by their printable names
        matcher.take(token)
    assert len(forced) == len('{"name": "')
    assert len(allowed(matcher)) > 50


@pytest.mark.parametrize(
    ("kind", "source", "problem"),
    [
        ("json_schema", "", "empty"),
        ("json_schema", '{"type":', "no JSON"),
        ("json_schema", "3", "no JSON object"),
        ("json_schema", '{"type": "wat"}', "Invalid type"),
        ("json_schema", '{"type": "array", "uniqueItems": true}', "uniqueItems"),
        ("json_schema", '{"type": "integer", "minimum": 3, "maximum": 1}', "minimum"),
        ("json_schema", '{"$ref": "http://127.0.0.1:9/x.json"}', "does not fetch"),
        ("json_schema", '{"$ref": "file:///etc/passwd"}', "does not fetch"),
        ("json_schema", "[" * 50_000, "deep"),
        ("json_schema", json.dumps({"const": "x" * MAX_BYTES}), "bytes"),
        ("regex", "", "empty"),
        ("regex", "(a", "unclosed"),
        ("regex", "(?=a)b", "look-around"),
        ("regex", r"[^\s\S]", "nothing matches"),
        ("choice", (), "1 to 1000"),
        ("choice", ("a",) * 1001, "1 to 1000"),
        ("choice", ("a", ""), "value 1 is empty"),
        ("grammar", "", "empty"),
        ("grammar", "start: x", "unknown name"),
        ("grammar", 'x: "a"', "start"),
        ("poem", "x", "poem"),
    ],
)
def test_what_is_wrong_is_said(kind: str, source: Source, problem: str, of_bytes: GrammarCompiler) -> None:
    with pytest.raises(ValueError, match=problem) as refused:
        of_bytes.compile(kind, source)
    assert len(str(refused.value)) <= 400


@pytest.mark.parametrize(
    ("kind", "source"),
    [
        ("regex", "(a{1000}){1000}"),
        ("regex", "a{1000000}"),
        ("regex", "(.*a.{200}){200}"),
        ("regex", "(a?){500}a{500}"),
        ("grammar", 'start: x{1000}\nx: y{1000}\ny: "abc"'),
        ("grammar", 'start: start start | "a" | '),
        ("grammar", "start: A\nA: /(.*a.{20}b.*)/ & ~/.*x.{20}y.*/ & /.*[q-z].{15}m/"),
        ("grammar", "start: " + " | ".join(f'"x{i}"' for i in range(5000))),
        ("json_schema", json.dumps({"allOf": [{"anyOf": [{"required": [f"{i}{k}"]} for k in range(6)]} for i in range(8)]})),
        ("json_schema", json.dumps({"const": "lorem ipsum " * 8000})),
    ],
)
def test_hostile_grammars_cost_little(kind: str, source: Source, of_bytes: GrammarCompiler) -> None:
    """Refused or followed: each within seconds of processor time, the first tokens included."""
    began = time.process_time()
    try:
        matcher = of_bytes.compile(kind, source).matcher()
        for _ in range(200):
            if matcher.failed:
                break
            matcher.take(allowed(matcher)[0])
    except ValueError as error:
        assert str(error)
    assert time.process_time() - began < 5.0


def test_a_dead_end_is_a_failure_that_ends(of_bytes: GrammarCompiler) -> None:
    matcher = of_bytes.compile("grammar", 'start: "x" Y\nY: /a+/ & /b+/').matcher()
    while not matcher.failed:
        choices = allowed(matcher)
        matcher.take(choices[0])
    assert matcher.forced == IM_END
    assert allowed(matcher) == [IM_END]


def test_a_stray_token_is_a_failure(of_bytes: GrammarCompiler) -> None:
    matcher = of_bytes.compile("choice", ("yes", "no")).matcher()
    outside = next(token for token in range(256) if token not in allowed(matcher))
    matcher.take(outside)
    assert matcher.failed


def test_text_that_spells_the_end_is_no_end(of_bytes: GrammarCompiler) -> None:
    with pytest.raises(ValueError, match="spells the end"):
        of_bytes.compile("choice", ("<|im_end|>",))


def test_what_was_compiled_is_remembered(of_bytes: GrammarCompiler) -> None:
    assert of_bytes.known("regex", "abc+d") is None
    compiled = of_bytes.compile("regex", "abc+d")
    assert of_bytes.known("regex", "abc+d") is compiled is of_bytes.compile("regex", "abc+d")
    assert of_bytes.known("grammar", "abc+d") is None
    for number in range(20):
        of_bytes.compile("choice", (str(number), "x" * (MAX_BYTES - 100)))
    assert of_bytes.known("regex", "abc+d") is None


def test_what_was_refused_is_remembered(of_bytes: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="forces a text") as first:
        of_bytes.compile("regex", "a{900000}")
    monkeypatch.setattr(llguidance, "LLMatcher", None)  # compiling would fail otherwise
    for again in (of_bytes.known, of_bytes.compile):
        with pytest.raises(ValueError, match="forces a text") as refused:
            again("regex", "a{900000}")
        assert str(refused.value) == str(first.value)


def test_what_is_forgotten_is_gone_at_once(of_bytes: GrammarCompiler) -> None:
    """Without the collector of cycles, which does not see how much memory a compiled grammar takes."""
    gc.disable()
    try:
        compiled = CompiledGrammar(of_bytes._tokens, 'start: "a" | "b"', of_bytes.vocab_size, of_bytes.eos_token_ids)
        matcher = compiled.matcher()
        matcher.take(ord("a"))
        gone = weakref.ref(compiled), weakref.ref(compiled._origin), weakref.ref(compiled._source)
        del compiled, matcher
        assert [each() for each in gone] == [None, None, None]
        before = _num_compiled()
        for number in range(5):
            with pytest.raises(ValueError, match=r"."):
                of_bytes.compile("regex", f"a{{9000{number}}}")
        assert _num_compiled() == before
    finally:
        gc.enable()


def _num_compiled() -> int:
    return sum(type(each) is CompiledGrammar for each in gc.get_objects())


def test_what_is_remembered_is_bounded(of_bytes: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_module, "MAX_REMEMBERED", 5)
    monkeypatch.setattr(grammar_module, "MAX_REMEMBERED_BYTES", 2000)
    good = of_bytes.compile("regex", "kept|in use")
    for number in range(20):
        with pytest.raises(ValueError, match="unclosed"):
            of_bytes.compile("regex", f"({number}")
        assert of_bytes.known("regex", "kept|in use") is good
        assert len(of_bytes._known) <= 5
    with pytest.raises(ValueError, match="invalid regex"):
        of_bytes.compile("regex", "(" + "日" * 650)
    num_bytes = of_bytes._num_bytes
    assert 1951 <= num_bytes <= 2000 and num_bytes == sum(len(source.encode()) for _, source in of_bytes._known)
    with pytest.raises(ValueError, match="bytes"):
        of_bytes.compile("regex", "(" * (MAX_BYTES + 1))
    assert of_bytes._num_bytes == num_bytes


def _chain(number: int, step: str, separator: str = ",") -> str:
    return separator.join(step.replace("HERE", str(i)).replace("NEXT", str(i + 1)) for i in range(number))


def _references(number: int, within: str = '{"$ref":"#/$defs/dNEXT"}') -> str:
    return f'{{"$ref":"#/$defs/d0","$defs":{{{_chain(number, chr(34) + "dHERE" + chr(34) + ":" + within)},"d{number}":{{}}}}}}'


@pytest.mark.parametrize("number", [200, 590, 1400, 4000])
@pytest.mark.parametrize(
    ("kind", "make"),
    [
        ("json_schema", _references),
        ("json_schema", lambda n: _references(n, '{"properties":{"a":{"$ref":"#/$defs/dNEXT"}}}')),
        ("json_schema", lambda n: _references(n, '{"anyOf":[{"allOf":[{"$ref":"#/$defs/dNEXT"}]}]}')),
        ("grammar", lambda n: "start: r0\n" + _chain(n, "rHERE: rNEXT", "\n") + f'\nr{n}: "a"'),
        ("grammar", lambda n: "start: R0\n" + _chain(n, 'RHERE: "a" RNEXT', "\n") + f'\nR{n}: "a"'),
        ("grammar", lambda n: "start: %json " + _references(n)),
    ],
)
def test_deep_definitions_do_not_overflow_the_stack(
    kind: str, make: Callable[[int], str], number: int, of_bytes: GrammarCompiler
) -> None:
    """Without a limit the process would end here, not the test only."""
    source = make(number)
    if len(source) > MAX_BYTES:
        with pytest.raises(ValueError, match="at most"):
            of_bytes.compile(kind, source)
        return
    began = time.process_time()
    try:
        matcher = of_bytes.compile(kind, source).matcher()
        for _ in range(50):
            if matcher.failed:
                break
            matcher.take(allowed(matcher)[0])
    except ValueError as error:
        assert number > 200 or "forces a text" in str(error)
    assert time.process_time() - began < 5.0
    if number == 4000:
        with pytest.raises(ValueError, match="levels deep"):
            of_bytes.compile(kind, source)


def test_definitions_that_refer_to_themselves_are_not_deep(of_bytes: GrammarCompiler) -> None:
    tree = {"$ref": "#/$defs/n~1ode", "$defs": {"n/ode": {"type": "array", "items": {"$ref": "#/$defs/n~1ode"}}}}
    matcher = of_bytes.compile("json_schema", json.dumps(tree)).matcher()
    assert not matcher.failed


def test_a_long_history_is_followed_in_slices(of_bytes: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    grammar, pauses = of_bytes.compile("regex", "[a-z]*"), list[float]()
    letter, *_ = allowed(grammar.matcher())
    history = [letter] * 500
    monkeypatch.setattr(grammar_module, "SLICE_S", 0.0)
    monkeypatch.setattr(time, "sleep", pauses.append)
    matcher, stray = grammar.follow(history)
    assert stray is None and len(pauses) == 500
    expected = grammar.matcher()
    for token_id in history:
        expected.take(token_id)
    assert allowed(matcher) == allowed(expected)
    stray_token = next(token for token in range(256) if token not in allowed(expected))
    assert grammar.follow([*history, stray_token, letter])[1] == 500


MANY_STATES = r"(?s:.*)a(?s:.){24}"
"""How far back each "a" stands is a state of its own."""


@pytest.fixture
def few_states(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = llguidance.LLParserLimits(max_lexer_states=1000, verbose_errors=False)
    monkeypatch.setattr(grammar_module, "_limits", lambda: limits)


def _masks(grammar: CompiledGrammar, letters: Sequence[int], seed: int) -> list[bytes]:
    """What is allowed behind each of 100 letters, until the grammar cannot be followed."""
    matcher, chance, found = grammar.matcher(), random.Random(seed), list[bytes]()
    for _ in range(100):
        if matcher.failed:
            break
        found.append(matcher.allowed().tobytes())
        matcher.take(chance.choice(letters))
    return found


@pytest.mark.usefixtures("few_states")
def test_states_that_other_outputs_have_found_end_no_output(tmp_path: Path) -> None:
    write_byte_tokenizer(tmp_path)
    tokenizer = Tokenizer.load(tmp_path)
    compiler, letters = compiler_of(tokenizer), tokenizer.encode("ab")
    shared = compiler.compile("regex", MANY_STATES)
    for seed in range(12):
        alone = compiler._compile("regex", MANY_STATES)
        assert len(_masks(alone, letters, seed)) == 100 and not alone.is_spent
        assert _masks(shared, letters, seed) == _masks(alone, letters, seed)
    assert shared.is_spent and compiler.known("regex", MANY_STATES) is None
    again = compiler.compile("regex", MANY_STATES)
    assert again is not shared and compiler.known("regex", MANY_STATES) is again and compiler._num_bytes == len(MANY_STATES)


@pytest.mark.usefixtures("few_states")
def test_a_grammar_that_compiles_slowly_is_not_compiled_within_an_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_module, "MAX_RENEWAL_S", -1.0)
    write_byte_tokenizer(tmp_path)
    tokenizer = Tokenizer.load(tmp_path)
    compiler, letters = compiler_of(tokenizer), tokenizer.encode("ab")
    shared = compiler.compile("regex", MANY_STATES)
    lengths = [len(_masks(shared, letters, seed)) for seed in range(12)]
    assert lengths[0] == 100 and lengths[-1] < 100 and shared.is_spent
    assert len(_masks(compiler.compile("regex", MANY_STATES), letters, 11)) == 100


def test_without_an_end_nothing_can_be_constrained(tmp_path: Path) -> None:
    write_byte_tokenizer(tmp_path)
    compiler = GrammarCompiler(Tokenizer.load(tmp_path).to_json(), VOCAB_SIZE, ())
    with pytest.raises(ValueError, match="end-of-sequence"):
        compiler.compile("regex", "a")


def test_an_ambiguous_grammar_costs_little_or_fails(of_bytes: GrammarCompiler) -> None:
    """Its items grow with the output, and what a token costs with their cube: their number is bounded."""
    matcher = of_bytes.compile("grammar", 'start: s\ns: "a" | s s | s s s').matcher()
    began = time.monotonic()
    for _ in range(400):
        matcher.take(allowed(matcher)[0])
    assert matcher.failed and time.monotonic() - began < 5


@pytest.mark.parametrize("source", ['start: "a" start', 'start: "hello " start | "hello " start "x"'])
def test_text_that_is_forced_without_end_is_refused(source: str, of_bytes: GrammarCompiler) -> None:
    with pytest.raises(ValueError, match="forces a text"):
        of_bytes.compile("grammar", source)


def test_the_last_token_of_a_history_may_lead_nowhere(of_bytes: GrammarCompiler) -> None:
    """The mesh itself emitted it before it found out; only what the grammar forbids is stray."""
    grammar = of_bytes.compile("grammar", 'start: /[a-z]/ "<|im_end|>" "x"')
    matcher = grammar.matcher()
    letter, other = allowed(matcher)[:2]
    stray = next(token for token in range(256) if token not in allowed(matcher))
    matcher.take(letter)
    assert matcher.failed
    assert grammar.first_stray([letter]) is None
    assert grammar.first_stray([letter, other]) == 0
    assert grammar.first_stray([stray]) == 0


def test_a_choice_of_any_character(of_bytes: GrammarCompiler) -> None:
    of_bytes.compile("choice", ["a\x7fb", "\u2028", '"\\'])
