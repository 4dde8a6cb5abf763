"""Forced calls of `make bench-constrained`: 500 requests over HTTP with 20 tools' schemas, each asked whole and streamed.

The tools of a request are three of the twenty; it has to call one. A call has to parse, to validate and to be the same in both.
Round after round, as many tokens of the same conversations without tools are beside them.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jsonschema
import openai

from benchmarks.harness import Figure, say

NUM_REQUESTS, ROUNDS, STREAMS, NUM_TOOLS, OFFERED = 500, 10, 16, 20, 3
MAX_TOKENS = 512
GOAL = 0.95

Schema = dict[str, Any]
_THINGS = ("order", "user", "invoice", "room", "flight", "song", "ticket", "parcel", "device", "page")
_PROPERTIES: tuple[tuple[str, Schema], ...] = (
    ("id", {"type": "string", "minLength": 1, "maxLength": 12}),
    ("count", {"type": "integer", "minimum": 0, "maximum": 99}),
    ("kind", {"enum": ["small", "large", "other"]}),
    ("is_urgent", {"type": "boolean"}),
    ("day", {"type": "string", "pattern": "^20[0-9]{2}-[01][0-9]-[0-3][0-9]$"}),
    ("tags", {"type": "array", "items": {"enum": ["new", "old", "open"]}, "minItems": 1, "maxItems": 3}),
    ("note", {"type": ["string", "null"], "maxLength": 20}),
    (
        "place",
        {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 10}},
            "required": ["city"],
            "additionalProperties": False,
        },
    ),
)


def tool(number: int) -> tuple[str, Schema]:
    """A name and the schema of its arguments: two to four properties, each required or not by chance."""
    chance = random.Random(number)
    chosen = dict(chance.sample(_PROPERTIES, chance.randint(2, 4)))
    required = [name for name in chosen if chance.random() < 0.7] or list(chosen)[:1]
    schema = {"type": "object", "properties": chosen, "required": required, "additionalProperties": False}
    verb = ("find", "change")[number // len(_THINGS) % 2]
    return f"{verb}_{_THINGS[number % len(_THINGS)]}", schema


TOOLS: Mapping[str, Schema] = dict(tool(number) for number in range(NUM_TOOLS))


def request(number: int) -> dict[str, Any]:
    """The arguments of one request."""
    names = random.Random(number).sample(sorted(TOOLS), OFFERED)
    described = [
        {"type": "function", "function": {"name": name, "description": name.replace("_", " "), "parameters": TOOLS[name]}}
        for name in names
    ]
    messages = [{"role": "user", "content": f"Please {names[0].replace('_', ' the ')} of number {number}."}]
    return {
        "messages": messages,
        "tools": described,
        "tool_choice": "required",
        "parallel_tool_calls": False,  # so small a model goes on calling until its tokens are used up
        "max_tokens": MAX_TOKENS,
        "temperature": 0.8,
        "seed": number,
    }


@dataclass(frozen=True)
class Said:
    """What an answer is: its calls as (name, arguments), its text, why it ended, and how many tokens it took."""

    calls: tuple[tuple[str, str], ...]
    text: str
    finish_reason: str
    num_tokens: int


@dataclass
class Samples:
    forced: list[float] = field(default_factory=list)
    unconstrained: list[float] = field(default_factory=list)
    num_answers: int = 0
    num_calls: int = 0
    wrong: list[str] = field(default_factory=list)
    differing: list[int] = field(default_factory=list)


def why_wrong(number: int, said: Said) -> str | None:
    """Why an answer is no call of its tools; None if it is."""
    if said.finish_reason != "tool_calls" or said.text or not said.calls:
        return f"{number}: {said}"
    for name, arguments in said.calls:
        try:
            jsonschema.validate(json.loads(arguments), TOOLS[name])
        except (KeyError, ValueError, jsonschema.ValidationError) as error:
            return f"{number}: {name}: {error}: {arguments}"
    return None


class Asker:
    """Asks over HTTP, STREAMS requests at a time."""

    def __init__(self, client: openai.AsyncOpenAI, model: str) -> None:
        self._create: Any = client.chat.completions.create  # its overloads know no arguments by name
        self._model = model
        self._turn = asyncio.Semaphore(STREAMS)

    async def whole(self, number: int) -> Said:
        answer = await self._create(model=self._model, **request(number))
        choice, usage = answer.choices[0], answer.usage
        assert usage is not None
        calls = tuple((call.function.name, call.function.arguments) for call in choice.message.tool_calls or [])
        return Said(calls, choice.message.content or "", choice.finish_reason, usage.completion_tokens)

    async def streamed(self, number: int) -> Said:
        calls: list[list[str]] = []
        text, finish_reason, num_tokens = "", "", 0
        options = {"include_usage": True}
        stream = await self._create(model=self._model, **request(number), stream=True, stream_options=options)
        async for chunk in stream:
            num_tokens = chunk.usage.completion_tokens if chunk.usage else num_tokens
            for choice in chunk.choices:
                text += choice.delta.content or ""
                finish_reason = choice.finish_reason or finish_reason
                for call in choice.delta.tool_calls or []:
                    if call.function.name:
                        calls.append([call.function.name, ""])
                    calls[call.index][1] += call.function.arguments or ""
        return Said(tuple((name, arguments) for name, arguments in calls), text, finish_reason, num_tokens)

    async def free(self, number: int, num_tokens: int) -> Said:
        messages, extra = request(number)["messages"], {"ignore_eos": True}
        answer = await self._create(
            model=self._model, messages=messages, max_tokens=num_tokens, temperature=0.8, seed=number, extra_body=extra
        )
        assert answer.usage is not None
        return Said((), "", "", answer.usage.completion_tokens)

    async def all(self, calls: Sequence[Callable[[], Awaitable[Said]]]) -> tuple[list[Said], float]:
        """What they say, and tokens per second."""

        async def one(call: Callable[[], Awaitable[Said]]) -> Said:
            async with self._turn:
                return await call()

        clock = asyncio.get_running_loop().time
        started = clock()
        answers = await asyncio.gather(*map(one, calls))
        return answers, sum(answer.num_tokens for answer in answers) / (clock() - started)


async def one_round(asker: Asker, numbers: range, samples: Samples) -> None:
    whole, tokens_per_s = await asker.all([lambda n=n: asker.whole(n) for n in numbers])  # type: ignore[misc]
    samples.forced.append(tokens_per_s)
    _, tokens_per_s = await asker.all([lambda n=n, s=s: asker.free(n, s.num_tokens) for n, s in zip(numbers, whole, strict=True)])  # type: ignore[misc]
    samples.unconstrained.append(tokens_per_s)
    streamed, _ = await asker.all([lambda n=n: asker.streamed(n) for n in numbers])  # type: ignore[misc]
    samples.num_answers += len(whole)
    samples.num_calls += sum(len(said.calls) for said in whole)
    samples.wrong += [why for number, said in zip(numbers, whole, strict=True) if (why := why_wrong(number, said))]
    samples.differing += [number for number, one, other in zip(numbers, whole, streamed, strict=True) if one != other]


async def measure(url: str, model: str) -> Samples:
    """After a round that warms up."""
    samples, size = Samples(), NUM_REQUESTS // ROUNDS
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", timeout=300, max_retries=0) as client:
        asker = Asker(client, model)
        await one_round(asker, range(NUM_REQUESTS, NUM_REQUESTS + size), Samples())
        for number in range(ROUNDS):
            await one_round(asker, range(number * size, (number + 1) * size), samples)
            speeds = f"calls {samples.forced[-1]:.0f} tokens/s, unconstrained {samples.unconstrained[-1]:.0f}"
            wrong = f"{len(samples.wrong)} wrong, {len(samples.differing)} other than streamed"
            say(f"round {number + 1}/{ROUNDS}: {speeds}; {wrong}")
    return samples


def figures(samples: Samples) -> list[Figure]:
    right, same = samples.num_answers - len(samples.wrong), samples.num_answers - len(samples.differing)
    ratio = statistics.median(a / b for a, b in zip(samples.forced, samples.unconstrained, strict=True))
    return [
        Figure("forced calls: answers whose calls all parse and validate", right, "answers", "higher", goal=NUM_REQUESTS),
        Figure("forced calls: answers that are the same streamed", same, "answers", "higher", goal=NUM_REQUESTS),
        Figure("forced calls: calls", samples.num_calls, "calls", "higher"),
        Figure("output, forced calls", statistics.median(samples.forced), "tokens/s", "higher"),
        Figure(
            "output, unconstrained, as many tokens as forced calls",
            statistics.median(samples.unconstrained),
            "tokens/s",
            "higher",
        ),
        Figure("speed of forced calls, by that of unconstrained", ratio, "ratio", "higher", goal=GOAL, peer="the same mesh"),
    ]
