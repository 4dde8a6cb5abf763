"""Tasks whose answer is mostly in the prompt: edit this code, reformat this JSON, summarize with quotes.

A model of 135 million parameters does them where it is shown one or two done before, and where its answer is begun for it: these
are the forms, of two dozen tried, in which SmolLM2-135M-Instruct did what it was asked for. It still makes mistakes: a task is
named here with how much of its greedy answer was the right one (difflib's ratio over tokens, mean of the first 36 jobs).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random

from benchmarks.spec.prompts import chat
from benchmarks.spec.texts import article, fenced, module, records

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
