"""Named workloads to be timed: what is copied, what is invented, both together, and that drawn in other ways.

Any number of jobs, the same ones every time; the first 36 are different texts, so that no batch shares its answers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from random import Random

from benchmarks.constrained_schemas import prompt, schema
from benchmarks.spec.prompts import chat, varied_prompts
from benchmarks.spec.tasks import COPYING
from benchmarks.spec.texts import CITIES, HOBBIES, THINGS, person
from pdmesh.sampling_params import SamplingParams

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
