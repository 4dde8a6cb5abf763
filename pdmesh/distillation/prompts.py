"""What the model is asked for the outputs that its draft heads learn from: made here, without end, from a seed alone.

Kinds of requests as people send them: questions and essays, instructions with conditions, letters, lists, stories, code to
write and to change, texts to summarize, to correct or to turn into another form, conversations of several turns.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence

from pdmesh.text.chat_template import Message

_NATURE = """rivers;volcanoes;honey bees;the water cycle;migrating birds;coral reefs;deserts;the moon;earthquakes;rain forests;
glaciers;whales;mushrooms;photosynthesis;the seasons;tides;wolves;soil;clouds;comets;the human heart;sleep;vitamins;vaccines;
memory"""
_MADE = """bridges;the printing press;bicycles;steam engines;clocks;paper;glass;the telephone;railways;sailing ships;
lighthouses;windmills;the compass;cameras;radio;solar panels;batteries;canals;maps;pottery;weaving;bread;tea;cheese;chess"""
_PEOPLE = """the Roman Empire;ancient Egypt;the Silk Road;the Renaissance;the French Revolution;Viking voyages;medieval towns;
the Inca;the Olympic Games;trade unions;public libraries;democracy;money;taxes;inflation;town planning;schools;folk music;
theatre;poetry;architecture;photography;painting;opera;gardening"""
_WORK = """learning a language;time management;job interviews;public speaking;saving money;healthy eating;running;yoga;teamwork;
customer service;writing a report;project planning;remote work;negotiation;starting a small business;marketing;recycling;
travelling by train;camping;raising a puppy;moving house;teaching children to read;first aid;computer security;databases"""
_SCIENCE = """gravity;atoms;electricity;magnets;light;sound;prime numbers;probability;statistics;fractions;geometry;algorithms;
machine learning;the internet;operating systems;DNA;evolution;bacteria;black holes;the speed of light;acids and bases;heat;
metals;plastics;satellites"""
TOPICS = [topic.strip() for group in (_NATURE, _MADE, _PEOPLE, _WORK, _SCIENCE) for topic in group.replace("\n", " ").split(";")]

_QUESTIONS = """What is the most important thing to know about {a}?;Explain {a} to a ten-year-old.;
How are {a} and {b} connected?;Why does {a} matter today?;Write a short essay about {a}.;Give me five facts about {a}.;
What are common mistakes people make about {a}?;Compare {a} with {b}.;Describe the history of {a} in a few paragraphs.;
What would the world look like without {a}?;Write an introduction to an article about {a}.;
List the advantages and disadvantages of {a}.;How did people think about {a} a hundred years ago?;
Make a lesson plan about {a} for one hour.;Write ten quiz questions about {a}, with answers.;
What should a beginner read about {a}?;Write a persuasive speech about {a}.;Explain step by step how one can learn about {a}.;
Describe {a} without using technical words.;Write a dialogue between a teacher and a student about {a}.;
What questions do experts on {a} still ask?;Define {a} in one sentence, then explain it."""
_INSTRUCTIONS = """Write an e-mail to a colleague about {a}. Keep it {tone}.;
Write a {tone} letter to the editor of a newspaper about {a}.;Make a checklist for somebody who wants to start with {a}.;
Write a product description for a book about {a}. Make it {tone}.;Write a poem of three stanzas about {a}.;
Write a {tone} story that takes place near {a}.;Plan a weekend that has to do with {a}.;
Write a job advertisement for an expert on {a}.;Give three {tone} arguments for and against spending public money on {a}.;
Write a table of contents for a book about {a}.;Write a diary entry of somebody who has just discovered {a}.;
Write a news report about {a}. It should be {tone}.;Suggest titles for a talk about {a} and {b}.;
Write a recipe that a fan of {a} would like.;Answer as a {tone} museum guide: what can one see about {a}?"""
_TONES = "friendly;formal;short;funny;serious;simple;detailed;calm;enthusiastic;polite"
_TASKS = """reverses a list;counts the words of a text;checks whether a number is prime;merges two sorted lists;
finds the largest element;removes duplicates from a list;computes the factorial of a number;converts Celsius to Fahrenheit;
reads a CSV file and sums a column;checks whether a word is a palindrome;sorts a dictionary by its values;
flattens a nested list;finds the greatest common divisor;counts the vowels of a string;computes the n-th Fibonacci number;
validates an e-mail address;splits a list into chunks;finds all anagrams in a list of words;implements a stack;
implements a queue;implements binary search;parses a date;writes a dictionary to a JSON file;retries a function three times;
measures how long a function takes;draws a random sample;computes the average and the median;replaces tabs with spaces;
finds the longest word;generates a password"""
_LANGUAGES = "Python;Python;Python;JavaScript;C;Java;Go;Rust"
_CODE = """Write a {lang} function that {task}.;Write a {lang} function that {task}, and explain how it works.;
Write a {lang} program that {task}. Add comments.;Write unit tests for a {lang} function that {task}.;
What is wrong with most {lang} code that {task}?;Show two ways to write a {lang} function that {task}."""
_EDITS = """Rename the variables so that they say what they mean.;Add type hints and a docstring.;Add error handling.;
Rewrite it without a loop.;Explain this code line by line.;Find the bug, if there is one, and show the corrected code.;
Make it faster.;Turn it into a class.;Add a main function that shows how it is used."""
_SNIPPETS = (
    """def f(x):
    r = []
    for i in range(len(x)):
        if x[i] not in r:
            r.append(x[i])
    return r
""",
    """def total(items):
    s = 0
    for item in items:
        s = s + item['price'] * item['count']
    return s
""",
    """def find(a, t):
    lo, hi = 0, len(a)
    while lo < hi:
        m = (lo + hi) // 2
        if a[m] < t:
            lo = m + 1
        else:
            hi = m
    return lo
""",
    """def read(path):
    f = open(path)
    d = {}
    for line in f:
        k, v = line.split('=')
        d[k] = v
    return d
""",
    """def g(n):
    if n < 2:
        return n
    return g(n - 1) + g(n - 2)
""",
    """function count(words) {
  var result = {};
  for (var i = 0; i < words.length; i++) {
    result[words[i]] += 1;
  }
  return result;
}
""",
)
_OPENINGS = """For many years {a} has been a subject of quiet interest in the town of {place}.;
The {place} society for {a} met on a cold evening in {month}.;A report about {a} was published in {place} last {month}.;
When {name} first came to {place}, nobody there spoke about {a}."""
_MIDDLES = """{name}, who had studied it for {n} years, said that most people know only half of the story.;
It began with {n} volunteers and a room above a bakery.;
The costs were higher than expected, and the council had to decide in {month}.;
Visitors from {place} asked the same question again and again.;
Some of the older members remembered how {b} had changed everything before.;
There were {n} different opinions, and each of them was defended with patience.;
A small exhibition showed how {a} and {b} depend on each other.;The weather was bad, yet the hall was full.;
{name} kept a notebook, in which every observation was written down with its date.;
After {n} weeks the first results could be seen."""
_ENDINGS = """In the end they agreed to meet again in {month}.;
What remains is a collection of letters, now in the library of {place}.;Since then, {a} is taught in every school there.;
Nobody knows who paid for it.;{name} never spoke about it again."""
_READING = """Summarize this text in two sentences.;Summarize this text in three bullet points.;
Rewrite this text in simpler words.;Give this text a title.;Write three questions that this text answers.;Continue this text.;
Turn this text into a news report.;Who and what is this text about?;Rewrite this text in the present tense.;
Copy this text, and correct mistakes if there are any.;Turn this text into a letter."""
_PLACES = "Whitby;Aberdeen;Lyon;Salamanca;Trieste;Gdansk;Galway;Bergen;Porto;Leiden;Tartu;Graz"
_NAMES = "Mrs Hale;Dr Osei;Anna Lindt;Mr Pereira;Miriam Katz;Captain Rowe;Professor Sato;Young Tomas;Ines Duarte;Old Bartholomew"
_MONTHS = "January;February;March;April;May;June;July;August;September;October;November;December"
_FOLLOW_UPS = """Tell me more.;Can you give an example?;Why is that?;Please make it shorter.;And what about {b}?;
Say that again in simpler words.;How can I explain this to a friend?;Are there exceptions?;Thanks! What should I learn next?"""
_ANSWERS = """{a} is best understood by looking at a few examples first.;
That is a good question. {a} has many sides, and the most important one is how it changes over time.;
People have thought about {a} for a very long time. There are two main views.;In short, {a} helps us to understand {b}."""
_RAW = """The history of {a} begins;Chapter 1: {a}\n\n;Q: What is {a}?\nA:;Once upon a time, in {place}, {name} dreamed of {a}.;
# {a}\n\n;{place}, {month}. A new study about {a};Dear {name},\n\nthank you for your letter about {a}."""


def _split(text: str) -> list[str]:
    return [part.strip(" \n") or part for part in text.replace(";\n", ";").split(";")]


def requests(seed: int, *, held_out: bool = False) -> Iterator[list[Message] | str]:
    """Conversations that end with the user's turn, or (one in ten) texts to be continued as they are. Every tenth topic is used
    for the held-out requests and for no others."""
    source = random.Random(f"{seed} {held_out}")
    topics = [topic for index, topic in enumerate(TOPICS) if (index % 10 == 7) == held_out]
    makers: Sequence[Callable[[_Words], list[Message]]] = (
        [_ask] * 4 + [_instruct] * 3 + [_code, _edit] + [_read] * 3 + [_chat] * 2
    )
    while True:
        words = _Words(source, topics)
        yield _raw(words) if source.random() < 0.1 else source.choice(makers)(words)


class _Words:
    """Fills templates."""

    def __init__(self, source: random.Random, topics: list[str]) -> None:
        self.source = source
        a, b = source.sample(topics, 2)
        self.fixed = {"a": a, "b": b}

    def fill(self, templates: str) -> str:
        pools = {"tone": _TONES, "task": _TASKS, "lang": _LANGUAGES, "place": _PLACES, "name": _NAMES, "month": _MONTHS}
        chosen = {name: self.source.choice(_split(pool)) for name, pool in pools.items()}
        text = self.source.choice(_split(templates)).format(**self.fixed, **chosen, n=self.source.randint(2, 40))
        return text[0].upper() + text[1:]


def _user(text: str) -> list[Message]:
    return [Message("user", text)]


def _ask(words: _Words) -> list[Message]:
    return _user(words.fill(_QUESTIONS))


def _instruct(words: _Words) -> list[Message]:
    return _user(words.fill(_INSTRUCTIONS))


def _code(words: _Words) -> list[Message]:
    return _user(words.fill(_CODE))


def _edit(words: _Words) -> list[Message]:
    return _user(f"{words.fill(_EDITS)}\n\n```\n{words.source.choice(_SNIPPETS)}```")


def _read(words: _Words) -> list[Message]:
    middles = (words.fill(_MIDDLES) for _ in range(words.source.randint(2, 8)))
    return _user(f"{words.fill(_READING)}\n\n{' '.join([words.fill(_OPENINGS), *middles, words.fill(_ENDINGS)])}")


def _chat(words: _Words) -> list[Message]:
    turns = _ask(words)
    for _ in range(words.source.randint(1, 3)):
        turns += [Message("assistant", words.fill(_ANSWERS)), *_user(words.fill(_FOLLOW_UPS))]
    return turns


def _raw(words: _Words) -> str:
    return words.fill(_RAW)
