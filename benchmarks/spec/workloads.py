"""Named workloads to be timed: what is copied, what is invented, both together, and that drawn in other ways.

Any number of jobs, the same ones every time; the first 36 are different texts, so that no batch shares its answers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random

from benchmarks.constrained import prompt, schema
from benchmarks.spec.texts import CITIES, HOBBIES, THINGS, article, chat, fenced, module, person, records, varied_prompts
from pdmesh.sampling_params import SamplingParams

# Tasks whose answer is mostly in the prompt: edit this code, reformat this JSON, summarize with quotes.
#
# A model of 135 million parameters does them where it is shown one or two done before, and where its answer is begun for it:
# these are the forms, of two dozen tried, in which SmolLM2-135M-Instruct did what it was asked for. It still makes mistakes: a
# task is named here with how much of its greedy answer was the right one (difflib's ratio over tokens, mean of the first 36
# jobs).


FENCE = "```"
Rows = list[dict[str, object]]
Form = Callable[[Rows], str]


@dataclass(frozen=True)
class Task:
    """`right`: the answer that is asked for, behind the prompt; it ends before `stop` ("" where nothing marks its end)."""

    prompt: str
    right: str
    stop: str = FENCE


_SHOWN_CLASS = '''class Counter:
    """Counts words."""

    def __init__(self, words):
        self.words = words

    def first(self, limit):
        return self.words[:limit]'''
_SHOWN_FUNCTION = """def greet(name, times):
    for _ in range(times):
        print(f"Hello, {name}!")"""
_SHOWN = (
    ("Rename the parameter `limit` to `count`.", _SHOWN_CLASS, re.sub(r"\blimit\b", "count", _SHOWN_CLASS)),
    ("Rename the function `greet` to `welcome`.", _SHOWN_FUNCTION, _SHOWN_FUNCTION.replace("greet", "welcome")),
)


def rename_class(number: int) -> Task:
    """A document of edits: 0.71."""
    source, names = _module(number)
    order = f"Rename the class `{names['Keeper']}` to `Store`."
    return _edit(order, source, re.sub(rf"\b{names['Keeper']}\b", "Store", source), in_chat=False)


def rename_method(number: int) -> Task:
    """In a chat: 0.64."""
    source, names = _module(number)
    return _edit(
        f"Rename the method `{names['add']}` to `put`.", source, re.sub(rf"\b{names['add']}\b", "put", source), in_chat=True
    )


def rename_attribute(number: int) -> Task:
    """A document of edits: 0.71."""
    source, names = _module(number)
    return _edit(
        f"Rename `{names['limit']}` to `limit`.", source, re.sub(rf"\b{names['limit']}\b", "limit", source), in_chat=False
    )


def json_list(number: int) -> Task:
    """JSON Lines to a list, in a chat: 0.79."""
    return _reformat(number, "it is one record a line; write it as a list", _lines, _list, in_chat=True)


def json_lines(number: int) -> Task:
    """A list to JSON Lines, in a chat: 0.84."""
    return _reformat(number, "it is a list; write it one record a line", json.dumps, _lines, in_chat=True)


def json_indent(number: int) -> Task:
    """Another indent, in a document: 0.74."""
    orders = "it is indented by two; write it indented by four"
    return _reformat(
        number, orders, lambda rows: json.dumps(rows, indent=2), lambda rows: json.dumps(rows, indent=4), in_chat=False
    )


def quotes(number: int) -> Task:
    """Its first sentence is quoted already: 0.72."""
    text, first = _article(number)
    asked = chat(f"{text}\n\nSummarize this article with quotes from it.")
    return Task(f'{asked}In the words of the article: "{first}', text[len(first) :], stop="")


def quotes_as_shown(number: int) -> Task:
    """As another article was summarized: 0.65."""
    text, first = _article(number)
    other = article(Random(f"shown{number}"), number + 1, 4)
    told = _sentences(other)
    summary = f'The report says: "{told[0]} {told[1]}" It adds: "{told[-1]}"'
    asked = chat(f"{other}\n\nSummarize with quotes.", summary, f"{text}\n\nSummarize with quotes.")
    return Task(f'{asked}The report says: "{first}', text[len(first) :], stop="")


COPYING = (rename_class, json_list, quotes, rename_method, json_lines, quotes_as_shown, rename_attribute, json_indent)


def _module(number: int) -> tuple[str, Mapping[str, str]]:
    return module(Random(f"edit{number}"), number + number // len(COPYING))  # another one each time the same task comes round


def _edit(order: str, before: str, after: str, *, in_chat: bool) -> Task:
    first, rest = after.split("\n", 1)
    return Task(_ask(list(_SHOWN), order, before, "python", in_chat=in_chat) + first, f"\n{rest}\n")


def _reformat(number: int, orders: str, before: Form, after: Form, *, in_chat: bool) -> Task:
    random = Random(f"json{number}")
    shown, rows = records(random, 2), records(random, 5)
    order = f"Reformat this JSON: {orders}."
    prompt = _ask([(order, before(shown), after(shown))], order, before(rows), "json", in_chat=in_chat)
    return Task(prompt, f"{after(rows)}\n")


def _ask(shown: list[tuple[str, str, str]], order: str, before: str, language: str, *, in_chat: bool) -> str:
    begun = f"{FENCE}{language}\n"
    if in_chat:
        turns = [turn for told, old, new in shown for turn in (f"{told}\n\n{fenced(old, language)}", fenced(new, language))]
        return chat(*turns, f"{order}\n\n{fenced(before, language)}") + begun
    documents = [
        f"{told}\n\nBefore:\n\n{fenced(old, language)}\n\nAfter:\n\n{fenced(new, language)}\n\n---\n\n"
        for told, old, new in shown
    ]
    return "".join(documents) + f"{order}\n\nBefore:\n\n{fenced(before, language)}\n\nAfter:\n\n{begun}"


def _lines(rows: Rows) -> str:
    return "\n".join(json.dumps(row) for row in rows)


def _list(rows: Rows) -> str:
    return "[\n" + ",\n".join(f"  {json.dumps(row)}" for row in rows) + "\n]"


def _article(number: int) -> tuple[str, str]:
    text = article(Random(f"article{number}"), number, 7)
    return text, _sentences(text)[0]


def _sentences(text: str) -> list[str]:
    return re.split(r"(?<=[.\"]) (?=[A-Z\"])", text)


Encode = Callable[[str], Sequence[int]]


@dataclass(frozen=True)
class Job:
    prompt: str
    params: SamplingParams
    right: str = ""  # the answer to a task that has one: how much of it came says whether the model did the task
    schema: str = ""  # JSON: the answer is a document of it


def copying(number: int, encode: Encode) -> Job:
    """Edit this code, reformat this JSON, summarize with quotes, in turn; greedy. Ends where the answer does, or soon after."""
    task = COPYING[number % len(COPYING)](number)
    max_tokens = len(encode(task.right)) * 11 // 10 + 4
    stops = tuple(encode(task.stop)) if task.stop else ()
    if len(stops) > 1:
        raise ValueError(f"{task.stop!r} is {len(stops)} tokens of this model: nothing says where the answer ends")
    return Job(task.prompt, SamplingParams(temperature=0.0, max_tokens=max_tokens, stop_token_ids=stops), task.right)


_ESSAYS = (
    *(
        "the sea in winter",
        "why people collect things",
        "growing old in a village",
        "the first railway",
        "sleep",
        "a good teacher",
    ),
    *("cities without cars", "the history of bread", "silence", "what a map leaves out", "luck", "the invention of zero"),
)
_QUESTIONS = (
    *("how a lock on a canal works", "why leaves turn red", "what inflation is", "how vaccines work", "what a compiler does"),
    *("why the tides come twice a day", "how a violin makes its sound", "what a black hole is", "how cheese is made"),
    *("how a clock keeps time", "why ice floats", "what a court does"),
)


def prose(number: int, encode: Encode) -> Job:
    """Stories, essays and explanations, in turn. Every second one greedy, the others drawn with a seed."""
    random = Random(f"prose{number}")
    hero, city, things, hobby = person(random), random.choice(CITIES), random.choice(THINGS), random.choice(HOBBIES)
    prompts = (
        chat(f"Write a story about {hero}, who repairs {things} in {city} and dreams of {hobby}."),
        chat(f"Write an essay about {_ESSAYS[number // 3 % len(_ESSAYS)]}."),
        chat(f"Explain in detail {_QUESTIONS[number // 3 % len(_QUESTIONS)]}."),
    )
    return Job(prompts[number % 3], _params(number, 192))


def mixed(number: int, encode: Encode) -> Job:
    """A quarter copies, a quarter is prose, a quarter questions and small code, a quarter anything of the varied prompts."""
    turn = number // 4
    if number % 4 == 0:
        return copying(turn, encode)
    if number % 4 == 1:
        return prose(turn, encode)
    kinds = (
        ("question", "wanted code") if number % 4 == 2 else ("list", "translation", "maths", "table", "turns", "quotes", "json")
    )
    chosen = [prompt for prompt in varied_prompts() if prompt.kind == kinds[turn % len(kinds)]]
    return Job(chosen[turn // len(kinds) % len(chosen)].text, _params(turn, 128))


def penalized(number: int, encode: Encode) -> Job:
    """The mixed jobs, with all penalties and min-p; nothing is greedy."""
    job = mixed(number, encode)
    params = replace(job.params, temperature=1.0, top_p=1.0, min_p=0.05, seed=number)
    return replace(job, params=replace(params, repetition_penalty=1.1, presence_penalty=0.2, frequency_penalty=0.1))


def with_logprobs(number: int, encode: Encode) -> Job:
    """The mixed jobs, with the log-probabilities of five tokens each."""
    job = mixed(number, encode)
    return replace(job, params=replace(job.params, logprobs=5))


def json_schema(number: int, encode: Encode) -> Job:
    """Objects of a schema each, by a grammar."""
    return Job(chat(prompt(number).strip()), _params(number, 128), schema=json.dumps(schema(number)))


WORKLOADS: dict[str, Callable[[int, Encode], Job]] = {
    "copying": copying,
    "prose": prose,
    "mixed": mixed,
    "penalties, min-p": penalized,
    "logprobs": with_logprobs,
    "JSON schema": json_schema,
}


def jobs(workload: str, count: int, encode: Encode) -> list[Job]:
    """The first `count` jobs of a workload. `encode`: the tokenizer of the model that is timed, for limits and ends."""
    make = WORKLOADS[workload]
    return [make(number, encode) for number in range(count)]


def _params(number: int, max_tokens: int) -> SamplingParams:
    if number % 2 == 0:
        return SamplingParams(temperature=0.0, max_tokens=max_tokens)
    return SamplingParams(temperature=0.8, top_p=0.95, seed=1_000 + number, max_tokens=max_tokens)
