"""Fixed prompts of 1 to 2 000 tokens in several languages and in code, for equality and for speed.

Long ones are made from sources of the Python standard library, so nothing is fetched.
"""

import heapq
import inspect
import json.decoder
import textwrap
from collections.abc import Callable, Sequence

SHORT = (
    "What is the capital of France?",
    "def fibonacci(n):\n",
    "Die Hauptstadt von Deutschland ist",
    "Once upon a time, in a village by the sea, there lived",
    "¿Cuál es la diferencia entre una célula animal y una vegetal?",
    "日本の首都は東京です。東京の人口は",
    "Counting: one, two, three, four, five, six,",
    "SELECT name, COUNT(*) FROM orders WHERE",
    "Les trois mousquetaires étaient en réalité quatre :",
    "Привет! Расскажи мне о погоде в Москве.",
    "The derivative of x^3 + 2x with respect to x is",
    "🙂 Emoji can be split over tokens: 👩‍🚀🌍🎉",
    "To make bread you need flour, water, salt and yeast. First,",
    "#include <stdio.h>\nint main(void) {\n    printf(",
    "Explain photosynthesis to a child in two sentences.",
    "中国的首都是北京。北京是一座",
    '{"name": "pdmesh", "kind": "mesh", "parts": [',
    "Translate to Italian: The cat sleeps on the warm roof.",
)

MEDIUM = (
    "Summarize: "
    + "A mesh of services splits the work of a language model in two. The first part reads the prompt and fills a cache of keys "
    "and values; it is limited by arithmetic. The second part writes the answer token by token; it is limited by memory "
    "bandwidth. Between them the cache has to travel, and whatever happens on the way, the answer must stay the same. " * 2,
    "Write a short story that begins with this sentence.\n"
    + "The lighthouse keeper had counted ships for thirty years, and on the last night of November he counted one too many. " * 5,
)


def _source(module: object, start: int, length: int) -> str:
    return inspect.getsource(module)[start : start + length]  # type: ignore[arg-type]


def texts() -> list[str]:
    """All texts, shortest first within a group; with the one-token prompt of `encode_all` they are 25."""
    long = [
        "Explain this code:\n" + _source(heapq, 0, 2_400),
        "Complete this code:\n" + _source(json.decoder, 0, 3_600),
        "Review this function.\n" + _source(textwrap, 0, 4_800),
        _source(inspect, 20_000, 7_000),
    ]
    return [*SHORT, *MEDIUM, *long]


def encode_all(encode: Callable[[str], Sequence[int]], max_tokens: int = 2_000) -> list[list[int]]:
    """Token ids of every prompt: first one of a single token, last one of exactly `max_tokens`."""
    prompts = [list(encode(text)) for text in texts()]
    single = [prompts[0][0]]
    longest = list(encode(_source(inspect, 0, 16_000)))[:max_tokens]
    return [single, *prompts, longest]
