"""Compiles constraints on an output to grammars over a model's tokens (llguidance) and follows them token by token.

    compiler = GrammarCompiler(tokenizer.to_json(), vocab_size, eos_token_ids)
    grammar = compiler.compile("json_schema", '{"type": "object"}')     ValueError says what is wrong with it
    matcher = grammar.matcher()                                         one for each choice
    matcher.allowed(), matcher.take(token_id), matcher.allowed(), ...

JSON is written as `{"a": 1, "b": [2, 3]}`: with a space after comma and colon and no others, as most models were trained to write
it, which forces more of it and prevents endless spaces. A schema may say otherwise under "x-guidance".
"""

from __future__ import annotations

import json
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from copy import copy
from functools import cached_property
from typing import TypeVar
from urllib.parse import unquote

import llguidance
import numpy as np
from numpy.typing import NDArray

from pdmesh.text.exact_json import number_of
from pdmesh.text.json_schema import prepared, with_schemas

# The depth of a grammar's definitions. llguidance recurses along them, and a stack overflow ends the whole process: a few KB of
# `$ref` after `$ref` would do. So a grammar that is too deep is rejected, and any other is compiled on a stack that surely
# suffices (some 10 KB a level were measured).


T = TypeVar("T")

MAX_DEPTH = 3000
STACK_BYTES = 256 << 20  # of addresses: only the used part takes memory, until the thread ends

_REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
_stack_size = threading.Lock()


def check_schema_depth(schema: object) -> None:
    """Raise ValueError when following every reference of a JSON schema once may lead deeper than MAX_DEPTH."""
    depth, seen, ahead = 0, set[str](), ["#"]
    while ahead:
        reference = ahead.pop()
        if reference in seen:
            continue
        seen.add(reference)
        target_depth, references = _survey(_resolve(schema, reference))
        depth += target_depth
        _check(depth)
        ahead += references


def check_lark_depth(source: str) -> None:
    """Raise ValueError when a Lark grammar defines so much that its rules, and schemas within, may lead too deep: each step down
    has a colon, as a rule's or a member's."""
    _check(source.count(":"))


def with_deep_stack(work: Callable[[], T]) -> T:
    """Return the result of `work`, which may recurse as deep as the checks above allow."""
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:  # noqa: BLE001  whatever it is, it belongs to the caller
            errors.append(error)

    with _stack_size:  # applies to all threads of the process that start from now on
        before = threading.stack_size(STACK_BYTES)
        try:
            thread = threading.Thread(target=run, name="grammar-stack", daemon=True)
            thread.start()
        finally:
            threading.stack_size(before)
    thread.join()
    if errors:
        try:
            raise errors.pop()
        finally:
            del run  # with the error's traceback it would be a cycle, which keeps all that the callers hold
    return results[0]


def _check(depth: int) -> None:
    if depth > MAX_DEPTH:
        raise ValueError(f"its definitions may lead more than {MAX_DEPTH} levels deep; make it flatter")


def _survey(root: object) -> tuple[int, list[str]]:
    """Return how deep a value is nested, and the references in it. No recursion: a value may be nested as deep as Python can
    parse."""
    deepest, references, ahead = 0, list[str](), [(root, 1)]
    while ahead:
        value, depth = ahead.pop()
        deepest = max(deepest, depth)
        if isinstance(value, dict):
            references += [each for key, each in value.items() if key in _REFERENCES and isinstance(each, str)]
            ahead += [(each, depth + 1) for each in value.values()]
        elif isinstance(value, list):
            ahead += [(each, depth + 1) for each in value]
    return deepest, references


def _resolve(schema: object, reference: str) -> object:
    """Return what a reference names; the whole schema if it is not "#/path", so that at least its depth counts."""
    value = schema
    for part in unquote(reference.removeprefix("#")).split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(value, dict) and key in value:
            value = value[key]
        elif isinstance(value, list) and key.isdecimal() and int(key) < len(value):
            value = value[int(key)]
        else:
            return schema
    return value


Bits = NDArray[np.uint32]

KINDS = ("json_schema", "regex", "choice", "grammar")
MAX_BYTES = 128 * 1024
MAX_CHOICES = 1000
MAX_ERROR_CHARS = 300
MAX_REMEMBERED_BYTES = 1 << 20  # of source text; the compiled form may take a hundred times as much
MAX_REMEMBERED = 512
SLICE_S, PAUSE_S = 0.0005, 0.00005  # of a long replay: work with the GIL, then a pause for waiting threads
MAX_RENEWAL_S = 0.05  # the engine waits for it; what took longer to compile is not compiled once more in the middle of an output
_OUT_OF_STATES = "too many states"  # in llguidance's error

_JSON_STYLE: llguidance._lib.JsonCompileOptions = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def _limits() -> llguidance.LLParserLimits:
    """Return limits on a hostile grammar: about a second to compile, 2 ms for a token (the items of an ambiguous one are compared
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
    """Compile for one model. Remembers the latest compiled and rejected grammars. Thread-safe; nearly all of the work is done
    without the GIL."""

    def __init__(self, tokenizer_json: str, vocab_size: int, eos_token_ids: Collection[int]) -> None:
        """Create it. `vocab_size` and `eos_token_ids` are the model's. Nothing is done yet: see `warm`."""
        self.vocab_size = vocab_size
        self.eos_token_ids = tuple(sorted(eos_token_ids))
        self._tokenizer_json = tokenizer_json
        self._lock = threading.Lock()
        self._known: OrderedDict[tuple[str, str], CompiledGrammar | str] = OrderedDict()  # a text is the reason of a rejection
        self._num_bytes = 0
        self._warming = threading.Lock()
        self._unfit = ""

    def warm(self) -> None:
        """Prepare the vocabulary once, with the GIL: 0.25 s for 49,000 tokens, which takes 33 MB.

        Raises ValueError: no output of this model can be constrained, and why."""
        with self._warming:
            if self._unfit:
                raise ValueError(self._unfit)
            try:
                _ = self._tokens
            except ValueError as error:
                self._unfit = str(error)
                raise

    def known(self, kind: str, source: str | Sequence[str]) -> CompiledGrammar | None:
        """Return a grammar compiled before; None: it must be compiled, perhaps once more. Raises ValueError if it was rejected
        before, or is too large."""
        _check_size(source)
        key = (kind, _text(source))
        with self._lock:
            known = self._known.get(key)
            if known is not None:
                self._known.move_to_end(key)
        if isinstance(known, str):
            raise ValueError(known)
        return None if known is None or known.is_spent else known

    def compile(self, kind: str, source: str | Sequence[str]) -> CompiledGrammar:
        """Compile a grammar. `kind` is one of KINDS; `source` a text, or for "choice" the strings. Raises ValueError that says
        what is wrong."""
        known = self.known(kind, source)
        if known is not None:
            return known
        self.warm()
        key = (kind, _text(source))
        try:
            compiled = with_deep_stack(lambda: self._compile(kind, source))
        except ValueError as error:
            self._remember(key, str(error)[:MAX_ERROR_CHARS])
            raise
        self._remember(key, compiled)
        return compiled

    def _compile(self, kind: str, source: str | Sequence[str]) -> CompiledGrammar:
        return CompiledGrammar(self._tokens, _grammar_text(kind, source), self.vocab_size, self.eos_token_ids)

    @cached_property
    def _tokens(self) -> llguidance.LLTokenizer:
        if not self.eos_token_ids:
            raise ValueError("the model has no end-of-sequence token, so no output could end")
        try:
            return llguidance.LLTokenizer(self._tokenizer_json, n_vocab=self.vocab_size, eos_token=list(self.eos_token_ids))
        except Exception as error:
            raise ValueError(f"this model's tokenizer does not serve for grammars: {error}") from error

    def _remember(self, key: tuple[str, str], outcome: CompiledGrammar | str) -> None:
        with self._lock:
            if key not in self._known:
                self._num_bytes += len(key[1].encode())
            self._known[key] = outcome
            while len(self._known) > MAX_REMEMBERED or self._num_bytes > MAX_REMEMBERED_BYTES:
                (_, oldest), _ = self._known.popitem(last=False)
                self._num_bytes -= len(oldest.encode())


class _Source:
    """Hold what a matcher is made of, and whether the lexer states that all matchers of one grammar share are used up.

    It knows neither the grammar nor its matchers: those that are no longer remembered have to go at once. One may take megabytes
    that Python's collector of cycles does not see."""

    def __init__(self, tokens: llguidance.LLTokenizer, grammar: str) -> None:
        self.is_spent = False
        self.is_quick = True  # to compile
        self._tokens, self._grammar = tokens, grammar

    def begun(self) -> llguidance.LLMatcher:
        """Compile; return a matcher at the beginning, with states of its own."""
        return llguidance.LLMatcher(self._tokens, self._grammar, log_level=0, limits=_limits())

    def renewed(self) -> llguidance.LLMatcher | None:
        """Note that the shared states are used up; return a matcher with states of its own, or None where that takes too long."""
        self.is_spent = True
        return with_deep_stack(self.begun) if self.is_quick else None


class CompiledGrammar:
    """Hold a constraint for one model; its matchers are copies of one at the beginning.

    They share the lexer's states, which are found as outputs lead to them: what one request has paid for is there for the next.
    So all together may run into the limit on states. `is_spent` says that they have: the next request compiles the grammar again,
    and a matcher under way follows its output once more on states of its own."""

    def __init__(self, tokens: llguidance.LLTokenizer, grammar: str, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        """Compile. Raises ValueError: not a grammar, too complex, or nothing matches it."""
        self.vocab_size = vocab_size
        self._source = _Source(tokens, grammar)
        began_s = time.perf_counter()
        matcher = self._source.begun()
        _raise_error(matcher)
        self._source.is_quick = time.perf_counter() - began_s <= MAX_RENEWAL_S
        matcher.compute_bitmask()
        _raise_error(matcher)
        self._origin = GrammarMatcher(matcher, vocab_size, eos_token_ids, self._source.renewed)
        trial = self.matcher()
        if trial.forced is not None:  # an endless forced text runs into the limits at its first token
            trial.take(trial.forced)
        if self._origin.failed or (trial.failed and self._origin.forced not in eos_token_ids):
            raise ValueError("forces a text that is too long, or that spells the end of the sequence")

    @property
    def is_spent(self) -> bool:
        """Return whether the shared states are used up."""
        return self._source.is_spent

    def matcher(self) -> GrammarMatcher:
        """Return a matcher at the beginning of an output."""
        return self._origin.copy()

    def first_stray(self, output: Sequence[int]) -> int | None:
        """Return the index of the first token that violates the grammar; None if all follow it, or the last one only led to where
        the grammar cannot be followed any further."""
        return self.follow(output)[1]

    def follow(self, output: Sequence[int]) -> tuple[GrammarMatcher, int | None]:
        """Return a matcher after `output`, and the result of `first_stray`. Takes some 5 to 10 us a token, in slices: other
        threads run in between."""
        matcher, pause_at = self.matcher(), time.perf_counter() + SLICE_S
        for index, token_id in enumerate(output):
            matcher.take(token_id)
            if matcher.failed:
                is_last = index + 1 == len(output)
                return matcher, None if is_last and self._allows(output[:index], token_id) else index
            if time.perf_counter() >= pause_at:
                time.sleep(PAUSE_S)
                pause_at = time.perf_counter() + SLICE_S
        return matcher, None

    def _allows(self, output: Sequence[int], token_id: int) -> bool:
        return bool(self.follow(output)[0].allowed()[token_id // 32] >> token_id % 32 & 1)


class GrammarMatcher:
    """Hold the place of one choice in a grammar: a function of the tokens taken. Implements
    pdmesh.engine.sampling.grammar.Matcher.

    A run of tokens that the grammar forces is found where it begins and followed to its end: the tokenization of a text depends
    on what comes before it, so another look-up in its middle could give other tokens."""

    def __init__(
        self,
        matcher: llguidance.LLMatcher,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        renewed: Callable[[], llguidance.LLMatcher | None] | None = None,
    ) -> None:
        """`renewed` returns a matcher at the beginning with lexer states of its own, for when those that are shared are used
        up."""
        self.failed = False
        self._matcher = matcher
        self._renewed = renewed
        self._taken: list[int] = []
        self._vocab_size = vocab_size
        self._end = eos_token_ids[0]
        self._ends = frozenset(eos_token_ids)
        self._run: list[int] = []  # the next token last
        self._allowed: Bits | None = None  # at this place, once computed
        self._find_run()

    def copy(self) -> GrammarMatcher:
        """Return an independent copy at the same place."""
        copied = copy(self)
        copied._matcher, copied._run, copied._taken = self._matcher.deep_copy(), list(self._run), list(self._taken)
        return copied

    @property
    def forced(self) -> int | None:
        """Return the next token, where the grammar leaves no choice; end-of-sequence where it is complete or has failed."""
        return self._run[-1] if self._run else None

    def take(self, token_id: int) -> None:
        """Advance by this token."""
        if self.failed:
            return
        self._allowed = None
        self._taken.append(token_id)
        if self._run and self._run.pop() != token_id:
            self._run.clear()
        if not self._matcher.consume_token(token_id) and not self._renew():
            self._fail()
        elif not self._run:
            self._find_run()

    def allowed(self) -> Bits:
        """Return the tokens that may come next, as bits of [ceil(vocab_size / 32)]; at least one. Read-only: a second call
        returns the same array."""
        if self._allowed is None:
            self._allowed = self._find_allowed()
            self._allowed.flags.writeable = False
        return self._allowed

    def num_possible(self, token_ids: Sequence[int]) -> int:
        """Return how many of these tokens, from the first on, may follow each other; any spelling of forced text is accepted."""
        if self.failed:
            return 0
        return self._matcher.validate_tokens(list(token_ids))

    def _find_allowed(self) -> Bits:
        bits = np.zeros(-(-self._vocab_size // 32), np.uint32)
        if not self._run:
            self._matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
            if self._matcher.is_error() and self._renew():
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
        if self._matcher.is_error() and self._renew():
            self._run = self._matcher.compute_ff_tokens()[::-1]
        if self._matcher.is_error():
            self._fail()
        elif not self._ends.isdisjoint(self._run):
            self._fail()  # a text that spells an end-of-sequence token cannot be told from the end

    def _renew(self) -> bool:
        """Go on with lexer states of its own where the shared ones are used up, once; return whether it is where it was. What
        fails then has found too many states by itself."""
        renewed, self._renewed = self._renewed, None
        if renewed is None or _OUT_OF_STATES not in self._matcher.get_error():
            return False
        matcher = renewed()
        if matcher is None or not matcher.consume_tokens(self._taken):
            return False
        self._matcher = matcher
        return True

    def _fail(self) -> None:
        self.failed = True
        self._run = [self._end]


def _raise_error(matcher: llguidance.LLMatcher) -> None:
    if matcher.is_error():
        raise ValueError(_readable(matcher.get_error()))


def _text(source: str | Sequence[str]) -> str:
    return source if isinstance(source, str) else json.dumps(list(source))


def _check_size(source: str | Sequence[str]) -> None:
    size = len(source.encode()) if isinstance(source, str) else sum(len(value.encode()) for value in source)
    if size > MAX_BYTES:
        raise ValueError(f"has {size} bytes; at most {MAX_BYTES} are allowed")


def _grammar_text(kind: str, source: str | Sequence[str]) -> str:
    """Return the grammar for llguidance. Raises ValueError for what is obviously wrong."""
    if kind == "choice":
        return _of_choices(source)
    if not isinstance(source, str) or not source:
        raise ValueError("is empty")
    if kind == "json_schema":
        return llguidance.LLMatcher.grammar_from_json_schema(_checked_json(source), defaults=_JSON_STYLE)
    if kind == "regex":
        return llguidance.LLMatcher.grammar_from_regex(source)
    if kind == "grammar":
        check_lark_depth(source)
        return llguidance.LLMatcher.grammar_from_lark(with_schemas(source, _checked_json))
    raise ValueError(f"{kind!r} is none of {', '.join(KINDS)}")


def _of_choices(values: Sequence[str]) -> str:
    if not 1 <= len(values) <= MAX_CHOICES:
        raise ValueError(f"has {len(values)} values; 1 to {MAX_CHOICES} are allowed")
    if not all(values):
        raise ValueError(f"value {list(values).index('')} is empty; leave it out")
    # One terminal (a name in capitals): a rule with so many alternatives would cost far more.
    alternatives = " | ".join(json.dumps(value, ensure_ascii=False).replace("\x7f", r"\u007f") for value in values)
    return llguidance.LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {alternatives}")


def _checked_json(source: str) -> str:
    try:
        schema = json.loads(source, parse_float=number_of)
    except RecursionError:
        raise ValueError("is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"is no JSON: {error}") from error
    if not isinstance(schema, dict):
        raise ValueError('is no JSON object; a schema is one, such as {"type": "object"}')
    check_schema_depth(schema)
    return prepared(source, schema)


def _readable(error: str) -> str:
    """Return the first lines of an error of llguidance, which may continue with the grammar."""
    text = " ".join(error.replace("<non-verbose/>", "").split())
    return "nothing matches it" if text.startswith("NoExtension") else text[:MAX_ERROR_CHARS]
