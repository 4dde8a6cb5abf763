"""Constraints on an output, compiled to grammars over a model's tokens (llguidance) and followed token by token.

    compiler = GrammarCompiler(tokenizer.to_json(), vocab_size, eos_token_ids)
    grammar = compiler.compile("json_schema", '{"type": "object"}')     ValueError says what is wrong with it
    matcher = grammar.matcher()                                         one for each choice
    matcher.allowed(), matcher.take(token_id), matcher.allowed(), ...

JSON comes as `{"a": 1, "b": [2, 3]}`: with a space behind comma and colon and no others, as most models were trained to write it,
which forces more of it and leaves a model no way to write spaces for ever. A schema may say otherwise under "x-guidance".
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Collection, Sequence
from copy import copy
from functools import cached_property

import llguidance
import numpy as np
from numpy.typing import NDArray

Bits = NDArray[np.uint32]

KINDS = ("json_schema", "regex", "choice", "grammar")
MAX_BYTES = 128 * 1024
MAX_CHOICES = 1000
MAX_ERROR_CHARS = 300
MAX_REMEMBERED_BYTES = 1 << 20  # of source text; what it compiles to may take a hundred times as much
MAX_REMEMBERED = 512

_JSON_STYLE: llguidance._lib.JsonCompileOptions = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def _limits() -> llguidance.LLParserLimits:
    """What a hostile grammar can cost: about a second to compile, 2 ms for a token (the items of an ambiguous one are looked at
    in pairs), 40 MB of lexer states, and 0.1 s to find a text that it forces as a whole (of some 20 KB at most)."""
    return llguidance.LLParserLimits(
        initial_lexer_fuel=100_000,
        step_lexer_fuel=100_000,
        step_max_items=500,
        max_lexer_states=20_000,
        max_grammar_size=100_000,
        verbose_errors=False,
    )


class GrammarCompiler:
    """For one model. Remembers what it compiled last. Any thread may call it; the work is done without the GIL."""

    def __init__(self, tokenizer_json: str, vocab_size: int, eos_token_ids: Collection[int]) -> None:
        """`vocab_size` and `eos_token_ids` are the model's. Nothing is done yet: see `warm`."""
        self.vocab_size = vocab_size
        self.eos_token_ids = tuple(sorted(eos_token_ids))
        self._tokenizer_json = tokenizer_json
        self._lock = threading.Lock()
        self._known: OrderedDict[tuple[str, str], CompiledGrammar] = OrderedDict()
        self._warming = threading.Lock()

    def warm(self) -> None:
        """Prepares the vocabulary unless it has been: half a second with the GIL, so before anything is served.

        Raises ValueError: no output of this model can be constrained, and why."""
        with self._warming:
            _ = self._tokens

    def known(self, kind: str, source: str | Sequence[str]) -> CompiledGrammar | None:
        """What was compiled before, at once; None: it has to be compiled."""
        key = (kind, _text(source))
        with self._lock:
            if key in self._known:
                self._known.move_to_end(key)
            return self._known.get(key)

    def compile(self, kind: str, source: str | Sequence[str]) -> CompiledGrammar:
        """`kind` is one of KINDS; `source` a text, or for "choice" the strings. Raises ValueError that says what is wrong."""
        known = self.known(kind, source)
        if known is not None:
            return known
        grammar = _grammar_text(kind, source)
        self.warm()
        compiled = CompiledGrammar(self._tokens, grammar, self.vocab_size, self.eos_token_ids)
        self._remember((kind, _text(source)), compiled)
        return compiled

    @cached_property
    def _tokens(self) -> llguidance.LLTokenizer:
        if not self.eos_token_ids:
            raise ValueError("the model has no end-of-sequence token, so no output could end")
        try:
            return llguidance.LLTokenizer(self._tokenizer_json, n_vocab=self.vocab_size, eos_token=list(self.eos_token_ids))
        except Exception as error:
            raise ValueError(f"this model's tokenizer does not serve for grammars: {error}") from error

    def _remember(self, key: tuple[str, str], compiled: CompiledGrammar) -> None:
        with self._lock:
            self._known[key] = compiled
            while len(self._known) > MAX_REMEMBERED or sum(len(text) for _, text in self._known) > MAX_REMEMBERED_BYTES:
                self._known.popitem(last=False)


class CompiledGrammar:
    """A constraint for one model. Immutable; its matchers are copies of one that stands at the beginning."""

    def __init__(self, tokens: llguidance.LLTokenizer, grammar: str, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        """Raises ValueError: not a grammar, too complex, or nothing matches it."""
        self.vocab_size = vocab_size
        matcher = llguidance.LLMatcher(tokens, grammar, log_level=0, limits=_limits())
        _raise_error(matcher)
        matcher.compute_bitmask()
        _raise_error(matcher)
        self._origin = GrammarMatcher(matcher, vocab_size, eos_token_ids)
        trial = self.matcher()
        if trial.forced is not None:  # a text without end runs into the limits at its first token
            trial.take(trial.forced)
        if self._origin.failed or (trial.failed and self._origin.forced not in eos_token_ids):
            raise ValueError("forces a text that is too long, or that spells the end of the sequence")

    def matcher(self) -> GrammarMatcher:
        """At the beginning of an output."""
        return self._origin.copy()

    def first_stray(self, output: Sequence[int]) -> int | None:
        """The index of the first token that does not follow the grammar; None if all do, or the last one only led to where the
        grammar cannot be followed any further."""
        matcher = self.matcher()
        for index, token_id in enumerate(output):
            matcher.take(token_id)
            if matcher.failed:
                return None if index + 1 == len(output) and self._allows(output[:index], token_id) else index
        return None

    def _allows(self, output: Sequence[int], token_id: int) -> bool:
        matcher = self.matcher()
        for each in output:
            matcher.take(each)
        return bool(matcher.allowed()[token_id // 32] >> token_id % 32 & 1)


class GrammarMatcher:
    """Where one choice is in a grammar: a function of the tokens taken. Implements engine.grammar.Matcher.

    A run of tokens that the grammar forces is found where it begins and followed to its end: how text is cut into tokens
    depends on what comes before it, so to look again in its middle could give other tokens.
    """

    def __init__(self, matcher: llguidance.LLMatcher, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self.failed = False
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._end = eos_token_ids[0]
        self._ends = frozenset(eos_token_ids)
        self._run: list[int] = []  # the next token last
        self._find_run()

    def copy(self) -> GrammarMatcher:
        """At the same place, and on its own from here."""
        copied = copy(self)
        copied._matcher, copied._run = self._matcher.deep_copy(), list(self._run)
        return copied

    @property
    def forced(self) -> int | None:
        """The token that comes next, where the grammar leaves no choice; end-of-sequence where it is complete or has failed."""
        return self._run[-1] if self._run else None

    def take(self, token_id: int) -> None:
        """The output goes on with this token."""
        if self.failed:
            return
        if self._run and self._run.pop() != token_id:
            self._run.clear()
        if not self._matcher.consume_token(token_id):
            self._fail()
        elif not self._run:
            self._find_run()

    def allowed(self) -> Bits:
        """The tokens that may come next, as bits of [ceil(vocab_size / 32)]; at least one."""
        bits = np.zeros(-(-self._vocab_size // 32), np.uint32)
        if not self._run:
            self._matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
            if self._matcher.is_error():
                self._fail()
                bits[:] = 0
        if self._run:
            bits[self._run[-1] // 32] = 1 << self._run[-1] % 32
        return bits

    def _find_run(self) -> None:
        if self._matcher.is_stopped():
            self._run = [self._end]
            return
        self._run = self._matcher.compute_ff_tokens()[::-1]
        if self._matcher.is_error():
            self._fail()
        elif not self._ends.isdisjoint(self._run):
            self._fail()  # a text that spells an end-of-sequence token cannot be told from the end

    def _fail(self) -> None:
        self.failed = True
        self._run = [self._end]


def _raise_error(matcher: llguidance.LLMatcher) -> None:
    if matcher.is_error():
        raise ValueError(_readable(matcher.get_error()))


def _text(source: str | Sequence[str]) -> str:
    return source if isinstance(source, str) else json.dumps(list(source))


def _grammar_text(kind: str, source: str | Sequence[str]) -> str:
    """For llguidance. Raises ValueError for what is wrong on the face of it."""
    size = len(source.encode()) if isinstance(source, str) else sum(len(value.encode()) for value in source)
    if size > MAX_BYTES:
        raise ValueError(f"has {size} bytes; at most {MAX_BYTES} are allowed")
    if kind == "choice":
        return _of_choices(source)
    if not isinstance(source, str) or not source:
        raise ValueError("is empty")
    if kind == "json_schema":
        return llguidance.LLMatcher.grammar_from_json_schema(_checked_json(source), defaults=_JSON_STYLE)
    if kind == "regex":
        return llguidance.LLMatcher.grammar_from_regex(source)
    if kind == "grammar":
        return llguidance.LLMatcher.grammar_from_lark(source)
    raise ValueError(f"{kind!r} is none of {', '.join(KINDS)}")


def _of_choices(values: Sequence[str]) -> str:
    if not 1 <= len(values) <= MAX_CHOICES:
        raise ValueError(f"has {len(values)} values; 1 to {MAX_CHOICES} are allowed")
    if not all(values):
        raise ValueError(f"value {list(values).index('')} is empty; leave it out")
    # One terminal (a name in capitals): as a rule with so many alternatives it would cost far more.
    alternatives = " | ".join(json.dumps(value, ensure_ascii=False).replace("\x7f", r"\u007f") for value in values)
    return llguidance.LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {alternatives}")


def _checked_json(source: str) -> str:
    try:
        schema = json.loads(source)
    except RecursionError:
        raise ValueError("is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"is no JSON: {error}") from error
    if not isinstance(schema, dict):
        raise ValueError('is no JSON object; a schema is one, such as {"type": "object"}')
    return source


def _readable(error: str) -> str:
    """The first lines of an error of llguidance, which may go on with the grammar."""
    text = " ".join(error.replace("<non-verbose/>", "").split())
    return "nothing matches it" if text.startswith("NoExtension") else text[:MAX_ERROR_CHARS]
