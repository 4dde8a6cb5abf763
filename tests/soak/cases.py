"""Requests drawn at random: prompts, what is wanted of them, and what is wrong with the malformed ones."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from benchmarks.constrained import schema
from pdmesh.client.types import GenerateOptions

NUM_KNOWN = 400  # requests that come again and again, each time with the answer that they had the first time
NUM_CONVERSATIONS = 40
TURNS = 3
_FIRST_ID, _LAST_ID = 1000, 40_000
_NUM_PREFIXES, _PREFIX_TOKENS = 6, 96
_NUM_SCHEMAS = 40  # of most requests: applications have a few
_STOPS = ("e", " the", ".", "\n")
_REGEXES = (r"[a-z]{2,8}( [a-z]{2,8}){0,3}", r"[0-9]{1,6}", r"(yes|no|perhaps)", r"\([0-9]{3}\) [0-9]{4}")
_QUESTIONS = ("What is the capital of", "Tell me one thing about", "Name a river in", "Which language do people speak in")
_PLACES = ("France", "Peru", "Japan", "Kenya", "Norway", "Chile", "India", "Canada", "Greece", "Egypt", "Vietnam", "Mexico")
_SYSTEM = "You are a helpful assistant. Answer in one short sentence, politely, and say so when you do not know the answer."

# What is wrong: our name of the field, with a value that it may not have.
MALFORMED: tuple[GenerateOptions, ...] = (
    {"temperature": -1.0},
    {"top_p": 3.0},
    {"min_p": 2.0},
    {"n": 99},
    {"logprobs": 50},
    {"presence_penalty": 9.0},
    {"regex": "(unclosed"},
    {"json_schema": '{"type": "nonsense"}'},
)

Turn = tuple[str, str]


@dataclass(frozen=True)
class Case:
    """One request: token ids, or messages where there are any. `key` names what decides its answer; empty: it is asked once."""

    options: GenerateOptions
    prompt: tuple[int, ...] = ()
    messages: tuple[Turn, ...] = ()
    key: str = ""

    @property
    def num_choices(self) -> int:
        return self.options.get("n", 1)

    @property
    def constraint(self) -> str:
        """Of `regex` and `json_schema` the one that is given; empty without."""
        return next((name for name in ("regex", "json_schema") if name in self.options), "")

    @property
    def num_tokens(self) -> int | None:
        """Of each choice, where that is certain."""
        free = self.options.get("ignore_eos") and not self.options.get("stop") and not self.constraint
        return self.options["max_tokens"] if free else None


class Cases:
    """Draws from a generator of its own: the same seed gives the same requests."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._num_schemas = _NUM_SCHEMAS
        self._prefixes = [self._ids(_PREFIX_TOKENS) for _ in range(_NUM_PREFIXES)]
        self._known = [replace(self.fresh(seeded=True), key=f"known {number}") for number in range(NUM_KNOWN)]

    def known(self) -> Case:
        """One that was or will be asked more than once; now and then its prompt may not be in a cache."""
        case = self._rng.choice(self._known)
        return self._salted(case) if self._rng.random() < 0.3 else case

    def fresh(self, *, seeded: bool = False) -> Case:
        """A prompt that nobody has sent before; some begin as others do."""
        length = self._prompt_length()
        prompt = self._ids(length)
        if self._rng.random() < 0.15:
            prompt = (*self._rng.choice(self._prefixes), *prompt)
        return Case(self._options(seeded=seeded or self._rng.random() < 0.5), prompt=prompt)

    def conversation(self) -> Case:
        """The first turn of one that is held again and again; `next_turn` goes on."""
        number = self._rng.randrange(NUM_CONVERSATIONS)
        messages = (("system", _SYSTEM), ("user", _question(number, 0)))
        options: GenerateOptions = {"temperature": 0.8 * (number % 2), "seed": 1 + number, "max_tokens": 8 + number % 17}
        return Case(options, messages=messages, key=f"conversation {number} turn 0")

    def malformed(self) -> tuple[Case, str]:
        """A request that must be refused, and our name of the field that is wrong."""
        wrong = self._rng.choice(MALFORMED)
        options: GenerateOptions = {"max_tokens": 4, "seed": 1, **wrong}
        return Case(options, prompt=self._ids(8)), next(iter(wrong))

    def long_answer(self) -> Case:
        """One that takes its time: to be left, or to lapse."""
        options: GenerateOptions = {"max_tokens": self._rng.randint(24, 64), "seed": self._seed(), "ignore_eos": True}
        return Case(options, prompt=self._ids(self._prompt_length()))

    def short_answer(self) -> Case:
        """One of a burst. Each has a schema of its own, so that what remembers compiled grammars forgets some."""
        self._num_schemas += 1
        options: GenerateOptions = {"max_tokens": 4, "seed": self._seed(), "json_schema": _schema(self._num_schemas)}
        return Case(options, prompt=self._ids(self._rng.randint(8, 24)))

    def _salted(self, case: Case) -> Case:
        return replace(case, options={**case.options, "cache_salt": f"salt{self._rng.getrandbits(48):x}"})

    def _ids(self, length: int) -> tuple[int, ...]:
        return tuple(self._rng.randint(_FIRST_ID, _LAST_ID) for _ in range(length))

    def _seed(self) -> int:
        return self._rng.randint(1, 2**31 - 1)

    def _prompt_length(self) -> int:
        (bounds,) = self._rng.choices(((8, 48), (49, 300), (301, 1500)), (90, 9, 1))
        return self._rng.randint(*bounds)

    def _output_length(self) -> int:
        (bounds,) = self._rng.choices(((1, 8), (9, 24), (25, 64)), (82, 14, 4))
        return self._rng.randint(*bounds)

    def _options(self, *, seeded: bool) -> GenerateOptions:
        rng = self._rng
        options: GenerateOptions = {"max_tokens": self._output_length(), "temperature": rng.choice((0.0, 0.7, 1.0))}
        if seeded:
            options["seed"] = self._seed()
        if rng.random() < 0.1:
            options["n"] = rng.randint(2, 3)
        if rng.random() < 0.15:
            options["logprobs"] = rng.choice((0, 1, 5))
        kind = rng.choices(("fixed", "eos", "stop", "regex", "json_schema"), (50, 20, 15, 8, 7))[0]
        options.update(self._ending(kind))
        return options

    def _ending(self, kind: str) -> GenerateOptions:
        if kind == "fixed":
            return {"ignore_eos": True}
        if kind == "stop":
            return {"stop": [self._rng.choice(_STOPS)]}
        if kind == "regex":
            return {"regex": self._rng.choice(_REGEXES)}
        if kind == "json_schema":
            return {"json_schema": _schema(self._rng.randrange(_NUM_SCHEMAS)), "max_tokens": self._rng.randint(16, 64)}
        return {}


def next_turn(case: Case, answer: str) -> Case | None:
    """What is asked after `answer`; None: the conversation is over."""
    number, turn = (int(word) for word in case.key.split()[1::2])
    if turn + 1 == TURNS:
        return None
    messages = (*case.messages, ("assistant", answer), ("user", _question(number, turn + 1)))
    return replace(case, messages=messages, key=f"conversation {number} turn {turn + 1}")


def _question(number: int, turn: int) -> str:
    return f"{_QUESTIONS[(number + turn) % len(_QUESTIONS)]} {_PLACES[(number * 5 + turn * 7) % len(_PLACES)]}?"


def _schema(number: int) -> str:
    return json.dumps(schema(number))


def renamed(options: GenerateOptions, names: Mapping[str, str], without: Sequence[str] = ()) -> dict[str, object]:
    """The options as another protocol calls them."""
    return {names.get(name, name): value for name, value in options.items() if name not in without}
