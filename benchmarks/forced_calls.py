"""Forced calls of `make bench-constrained`: 500 requests over HTTP with 20 tools' schemas, each asked whole and streamed.

The tools of a request are three of the twenty; it has to call one. A call has to parse, to validate and to be the same in both.

Round after round as many tokens are asked for without a constraint, in two ways:

    with tools      the same prompts, token for token: the tools are shown, and none has to be called. What the constraint costs.
    without tools   the conversations alone, whose prompts are a tenth as long. What it costs to show tools, and the constraint.

Each way has a cache salt of its own, so that none finds the prompts of another in the prefix cache. Beside the speeds, which the
machine's other work disturbs, stands the processor time of a request in the workers and in the router.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from types import MappingProxyType
from typing import Any

import jsonschema
import openai

from benchmarks.harness import Figure, process_cpu_s, say

NUM_REQUESTS, ROUNDS, STREAMS, NUM_TOOLS, OFFERED = 500, 10, 16, 20, 3
NUM_WARM_UP = 16
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


class Way(StrEnum):
    """How a conversation is asked for; the value says it in figures."""

    FORCED = "forced calls"
    WITH_TOOLS = "unconstrained with the same prompts, which show the tools"
    WITHOUT_TOOLS = "unconstrained with prompts without tools"


@dataclass(frozen=True)
class Said:
    """What an answer is: its calls as (name, arguments), its text, why it ended, and how many tokens it and its prompt have."""

    calls: tuple[tuple[str, str], ...]
    text: str
    finish_reason: str
    num_tokens: int
    num_prompt_tokens: int


@dataclass(frozen=True)
class Pass:
    """All requests of a round in one way. `cpu_s`: of the mesh's processes by name, while they were under way."""

    answers: Sequence[Said]
    took_s: float
    cpu_s: Mapping[str, float]

    @property
    def tokens_per_s(self) -> float:
        return sum(answer.num_tokens for answer in self.answers) / self.took_s

    def cpu_ms(self, names: str) -> float:
        """Per request, of the processes whose names begin so."""
        return 1e3 * sum(spent for name, spent in self.cpu_s.items() if name.startswith(names)) / len(self.answers)


@dataclass
class Samples:
    """The passes of each way, one a round, and what was wrong with answers."""

    passes: dict[Way, list[Pass]] = field(default_factory=lambda: {way: [] for way in Way})
    wrong: list[str] = field(default_factory=list)
    differing: list[int] = field(default_factory=list)

    def of(self, way: Way, value: Callable[[Pass], float]) -> float:
        """The median over the rounds."""
        return statistics.median(map(value, self.passes[way]))

    def ratio(self, way: Way) -> float:
        """The speed of forced calls by that of another way: the median of the rounds' ratios."""
        pairs = zip(self.passes[Way.FORCED], self.passes[way], strict=True)
        return statistics.median(forced.tokens_per_s / other.tokens_per_s for forced, other in pairs)

    def answers(self, way: Way) -> list[Said]:
        return [answer for each in self.passes[way] for answer in each.answers]


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
    """Asks over HTTP, STREAMS requests at a time. `pids`: the mesh's processes by name."""

    def __init__(self, client: openai.AsyncOpenAI, model: str, pids: Mapping[str, int]) -> None:
        self._create: Any = client.chat.completions.create  # its overloads know no arguments by name
        self._model = model
        self._pids = pids
        self._turn = asyncio.Semaphore(STREAMS)

    async def forced(self, number: int) -> Said:
        """A call, whole."""
        return await self._whole(Way.FORCED, **request(number))

    async def free(self, way: Way, number: int, num_tokens: int) -> Said:
        """So many tokens without a constraint."""
        asked = request(number) | {"tool_choice": "auto", "max_tokens": num_tokens}
        if way is Way.WITHOUT_TOOLS:
            asked = {name: value for name, value in asked.items() if "tool" not in name}
        return await self._whole(way, {"ignore_eos": True}, **asked)

    async def _whole(self, way: Way, extra: Mapping[str, Any] = MappingProxyType({}), **asked: Any) -> Said:
        answer = await self._create(model=self._model, **asked, extra_body={"cache_salt": way.name, **extra})
        [choice], usage = answer.choices, answer.usage
        calls = tuple((call.function.name, call.function.arguments) for call in choice.message.tool_calls or [])
        text = choice.message.content or ""
        return Said(calls, text, choice.finish_reason, usage.completion_tokens, usage.prompt_tokens)

    async def streamed(self, number: int) -> Said:
        """A call, streamed; its prompt is in the cache when it was asked for whole before."""
        calls: list[list[str]] = []
        text, finish_reason, usage = "", "", None
        options, extra = {"include_usage": True}, {"cache_salt": Way.FORCED.name}
        asked = request(number) | {"stream": True, "stream_options": options, "extra_body": extra}
        async for chunk in await self._create(model=self._model, **asked):
            usage = chunk.usage or usage
            for choice in chunk.choices:
                text += choice.delta.content or ""
                finish_reason = choice.finish_reason or finish_reason
                for call in choice.delta.tool_calls or []:
                    if call.function.name:
                        calls.append([call.function.name, ""])
                    calls[call.index][1] += call.function.arguments or ""
        assert usage is not None
        named = tuple((name, arguments) for name, arguments in calls)
        return Said(named, text, finish_reason, usage.completion_tokens, usage.prompt_tokens)

    async def all(self, calls: Sequence[Callable[[], Awaitable[Said]]]) -> Pass:
        """What they say, how long it takes, and the processor time that it takes."""

        async def one(call: Callable[[], Awaitable[Said]]) -> Said:
            async with self._turn:
                return await call()

        clock = asyncio.get_running_loop().time
        before, started = self._cpu_s(), clock()
        answers = await asyncio.gather(*map(one, calls))
        took_s, after = clock() - started, self._cpu_s()
        return Pass(answers, took_s, {name: after[name] - before[name] for name in before})

    def _cpu_s(self) -> dict[str, float]:
        return {name: process_cpu_s(pid) for name, pid in self._pids.items()}


async def one_round(asker: Asker, numbers: range, samples: Samples) -> None:
    """Forced calls first: the others get the numbers of their tokens."""
    forced = await asker.all([partial(asker.forced, number) for number in numbers])
    samples.passes[Way.FORCED].append(forced)
    lengths = {number: said.num_tokens for number, said in zip(numbers, forced.answers, strict=True)}
    for way in (Way.WITH_TOOLS, Way.WITHOUT_TOOLS):
        free = await asker.all([partial(asker.free, way, number, length) for number, length in lengths.items()])
        samples.passes[way].append(free)
    streamed = await asker.all([partial(asker.streamed, number) for number in numbers])
    samples.wrong += [why for number, said in zip(numbers, forced.answers, strict=True) if (why := why_wrong(number, said))]
    both = zip(numbers, forced.answers, streamed.answers, strict=True)
    samples.differing += [number for number, one, other in both if one != other]


async def measure(url: str, model: str, pids: Mapping[str, int]) -> Samples:
    """After some requests that warm up."""
    samples, size = Samples(), NUM_REQUESTS // ROUNDS
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", timeout=300, max_retries=0) as client:
        asker = Asker(client, model, pids)
        await one_round(asker, range(NUM_REQUESTS, NUM_REQUESTS + NUM_WARM_UP), Samples())
        for number in range(ROUNDS):
            await one_round(asker, range(number * size, (number + 1) * size), samples)
            speeds = ", ".join(f"{way.name} {passes[-1].tokens_per_s:.0f}" for way, passes in samples.passes.items())
            wrong = f"{len(samples.wrong)} wrong, {len(samples.differing)} other than streamed"
            say(f"round {number + 1}/{ROUNDS}: {speeds} tokens/s; {wrong}")
    return samples


def figures(samples: Samples) -> list[Figure]:
    """The answers, then the speeds and their ratios, then what a request consists of and costs."""
    forced = samples.answers(Way.FORCED)
    right, same = len(forced) - len(samples.wrong), len(forced) - len(samples.differing)
    made = [
        Figure("forced calls: answers whose calls all parse and validate", right, "answers", "higher", goal=NUM_REQUESTS),
        Figure("forced calls: answers that are the same streamed", same, "answers", "higher", goal=NUM_REQUESTS),
        Figure("forced calls: calls", sum(len(said.calls) for said in forced), "calls", "higher"),
    ]
    made += [Figure(f"output, {way}", samples.of(way, lambda each: each.tokens_per_s), "tokens/s", "higher") for way in Way]
    for way in (Way.WITH_TOOLS, Way.WITHOUT_TOOLS):
        name = f"speed of forced calls, by that of {way}"
        made.append(Figure(name, samples.ratio(way), "ratio", "higher", goal=GOAL, peer="the same mesh"))
    return made + [figure for way in Way for figure in _costs(samples, way)]


def _costs(samples: Samples, way: Way) -> list[Figure]:
    answers = samples.answers(way)
    made = [
        Figure(f"{way}: tokens of a prompt", statistics.mean(said.num_prompt_tokens for said in answers), "tokens", "lower"),
        Figure(f"{way}: tokens of an answer", statistics.mean(said.num_tokens for said in answers), "tokens", "higher"),
    ]
    for names in ("prefill", "decode", "router"):
        spent = samples.of(way, lambda each, names=names: each.cpu_ms(names))  # type: ignore[misc]
        made.append(Figure(f"{way}: processor time of a request, {names}", spent, "ms", "lower"))
    return made
