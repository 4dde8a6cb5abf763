"""`make bench-constrained`: structured output through a mesh of SmolLM2, beside the same number of unconstrained tokens.

Each of 500 requests has a schema of its own; every answer has to parse and to validate. Round after round three kinds of
requests take turns: with schemas; unconstrained, with the same prompts and as many tokens; and with a constraint that forces
nothing, which shows what following a grammar costs where it saves no step of the model. Then 500 requests over HTTP that have to
call a tool (forced_calls.py).
"""

import asyncio
import json
import random
import statistics
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import jsonschema

from benchmarks import forced_calls
from benchmarks.harness import PLAIN_FLAGS, Figure, parser_of, say, write
from pdmesh.client.client import AsyncClient
from pdmesh.client.types import FinishReason, Generation
from pdmesh.launcher.mesh import LocalMesh
from pdmesh.launcher.plan import LocalMeshConfig
from pdmesh.models.registry import ensure_model

# JSON schemas as applications have them, made by number: all different and bounded, so that an output ends before max_tokens.


Schema = dict[str, object]

TOPICS = ("a person", "a book", "a city", "a recipe", "an order", "a film", "a bird", "a bridge", "a train", "a song")
NAMES = (
    "name", "title", "city", "colour", "year", "price_cents", "rating", "tags", "author", "country", "is_open", "height_m",
    "kind", "status", "comment", "sizes", "owner", "date", "code", "language", "active", "quantity", "origin", "summary", "level",
)  # fmt: skip
WORDS = ("red", "green", "blue", "small", "large", "open", "closed", "new", "in transit", "cancelled", "on hold", "unknown")


def schema(number: int) -> Schema:
    """An object of 2 to 6 properties, most of them required."""
    chance = random.Random(number)
    return _object(chance, chance.randint(2, 6), depth=0)


def prompt(number: int) -> str:
    """What the model is asked for."""
    return f"Describe {TOPICS[number % len(TOPICS)]} (number {number}) as one JSON object.\n"


def _object(chance: random.Random, num_properties: int, depth: int) -> Schema:
    names = chance.sample(NAMES, num_properties)
    required = [name for name in names if chance.random() < 0.8]
    return {
        "type": "object",
        "properties": {name: _value(chance, depth) for name in names},
        "required": required or names[:1],
        "additionalProperties": False,
    }


def _value(chance: random.Random, depth: int) -> Schema:
    makers: list[Callable[[random.Random], Schema]] = [
        _string,
        _string,
        _integer,
        _enum,
        _boolean,
        _pattern,
        _date,
        _nullable,
        _either,
    ]
    if depth < 2:
        makers += [lambda chance: _array(chance, depth), lambda chance: _object(chance, chance.randint(1, 3), depth + 1)]
    return chance.choice(makers)(chance)


def _string(chance: random.Random) -> Schema:
    return {"type": "string", "minLength": 1, "maxLength": chance.randint(5, 24)}


def _integer(chance: random.Random) -> Schema:
    low = chance.randint(-10, 2000)
    return {"type": "integer", "minimum": low, "maximum": low + chance.randint(1, 10_000)}


def _enum(chance: random.Random) -> Schema:
    return {"enum": chance.sample(WORDS, chance.randint(2, 5))}


def _boolean(chance: random.Random) -> Schema:
    return {"type": "boolean"}


def _pattern(chance: random.Random) -> Schema:
    return {
        "type": "string",
        "pattern": chance.choice([r"^[A-Z]{2}-[0-9]{4}$", r"^[a-z]{3,8}(-[a-z]{3,8})?$", r"^#[0-9a-f]{6}$"]),
    }


def _date(chance: random.Random) -> Schema:
    return {"type": "string", "format": chance.choice(["date", "ipv4"])}


def _nullable(chance: random.Random) -> Schema:
    return {"type": [chance.choice(["string", "boolean"]), "null"], "maxLength": 12}


def _either(chance: random.Random) -> Schema:
    return {"anyOf": [_integer(chance), {"const": chance.choice(WORDS)}]}


def _array(chance: random.Random, depth: int) -> Schema:
    return {
        "type": "array",
        "items": _value(chance, depth + 1),
        "minItems": chance.randint(0, 1),
        "maxItems": chance.randint(1, 3),
    }


NUM_REQUESTS, ROUNDS, STREAMS = 500, 10, 16
MAX_TOKENS = 512
FREE_TEXT, FREE_TOKENS = r"(.|\n){2000,}", 48  # end-of-sequence is out of reach, as it is with ignore_eos
GOAL = 0.95


@dataclass
class Samples:
    """Output tokens per second by round, and what was wrong with answers."""

    constrained: list[float] = field(default_factory=list)
    same_length: list[float] = field(default_factory=list)
    free: list[float] = field(default_factory=list)
    free_same_length: list[float] = field(default_factory=list)
    num_tokens: list[int] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


async def speed(calls: Sequence[Callable[[], Awaitable[Generation]]]) -> tuple[list[Generation], float]:
    """All calls, STREAMS at a time; tokens per second."""
    turn = asyncio.Semaphore(STREAMS)

    async def one(call: Callable[[], Awaitable[Generation]]) -> Generation:
        async with turn:
            return await call()

    clock = asyncio.get_running_loop().time
    started = clock()
    answers = await asyncio.gather(*map(one, calls))
    return answers, sum(answer.usage.completion_tokens for answer in answers) / (clock() - started)


def wrong(number: int, answer: Generation) -> str | None:
    """Why the answer is no document of its schema; None if it is one."""
    if answer.choices[0].finish_reason is not FinishReason.STOP:
        return f"{number}: ends in the middle, after {len(answer.token_ids)} tokens"
    try:
        jsonschema.validate(json.loads(answer.text), schema(number))
    except (ValueError, jsonschema.ValidationError) as error:
        return f"{number}: {error}: {answer.text}"
    return None


async def one_round(client: AsyncClient, numbers: range, samples: Samples) -> None:
    """Constrained first: the others get the number of its tokens."""
    answers, tokens_per_s = await speed([_constrained(client, number) for number in numbers])
    samples.constrained.append(tokens_per_s)
    samples.num_tokens += [len(answer.token_ids) for answer in answers]
    samples.wrong += [why for number, answer in zip(numbers, answers, strict=True) if (why := wrong(number, answer))]
    lengths = [len(answer.token_ids) for answer in answers]
    _, tokens_per_s = await speed([_unconstrained(client, number, n) for number, n in zip(numbers, lengths, strict=True)])
    samples.same_length.append(tokens_per_s)
    _, tokens_per_s = await speed([_free(client, number) for number in numbers])
    samples.free.append(tokens_per_s)
    _, tokens_per_s = await speed([_unconstrained(client, number, FREE_TOKENS) for number in numbers])
    samples.free_same_length.append(tokens_per_s)


def _constrained(client: AsyncClient, number: int) -> Callable[[], Awaitable[Generation]]:
    return lambda: client.generate(
        prompt(number), json_schema=schema(number), max_tokens=MAX_TOKENS, temperature=0.8, seed=number
    )


def _unconstrained(client: AsyncClient, number: int, num_tokens: int) -> Callable[[], Awaitable[Generation]]:
    return lambda: client.generate(prompt(number), ignore_eos=True, max_tokens=num_tokens, temperature=0.8, seed=number)


def _free(client: AsyncClient, number: int) -> Callable[[], Awaitable[Generation]]:
    return lambda: client.generate(prompt(number), regex=FREE_TEXT, max_tokens=FREE_TOKENS, temperature=0.8, seed=number)


async def measure(client: AsyncClient, num_requests: int, rounds: int) -> Samples:
    """After a round that warms up. Raises AssertionError for answers that are no documents."""
    samples, size = Samples(), num_requests // rounds
    await one_round(client, range(num_requests, num_requests + size), Samples())
    for number in range(rounds):
        await one_round(client, range(number * size, (number + 1) * size), samples)
        latest = (samples.constrained[-1], samples.same_length[-1], samples.free[-1], samples.free_same_length[-1])
        say(
            f"round {number + 1}/{rounds}: schemas {latest[0]:.0f} tokens/s, unconstrained {latest[1]:.0f}; "
            f"nothing forced {latest[2]:.0f}, unconstrained {latest[3]:.0f}; {len(samples.wrong)} wrong"
        )
    return samples


def figures(samples: Samples) -> list[Figure]:
    """Ratios are medians of the rounds' ratios."""
    pairs = [("with a schema each", samples.constrained, samples.same_length)]
    pairs += [("with a constraint that forces nothing", samples.free, samples.free_same_length)]
    made = [
        Figure("requests with a schema of their own", len(samples.num_tokens), "requests", "higher", goal=NUM_REQUESTS),
        Figure(
            "answers that parse and validate", len(samples.num_tokens) - len(samples.wrong), "answers", "higher", NUM_REQUESTS
        ),
        Figure("tokens of an answer, median", statistics.median(samples.num_tokens), "tokens", "higher"),
    ]
    for what, ours, theirs in pairs:
        ratio = statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
        made.append(Figure(f"output, {what}", statistics.median(ours), "tokens/s", "higher"))
        made.append(Figure(f"output, unconstrained, as many tokens as {what}", statistics.median(theirs), "tokens/s", "higher"))
        made.append(Figure(f"speed {what}, by that of unconstrained", ratio, "ratio", "higher", goal=GOAL, peer="the same mesh"))
    return made


async def main() -> None:
    folder = ensure_model("smollm2-135m-instruct", say)
    config = LocalMeshConfig(model=str(folder), port=0, http_port=0, worker_args=PLAIN_FLAGS)
    async with LocalMesh(config) as mesh, AsyncClient(mesh.router_addresses) as client:
        samples = await measure(client, NUM_REQUESTS, ROUNDS)
        calls = await forced_calls.measure(mesh.http_urls[0], folder.name, mesh.pids)
    wrong = samples.wrong + calls.wrong
    write("constrained", figures(samples) + forced_calls.figures(calls), streams=STREAMS, wrong=wrong, differing=calls.differing)
    if wrong or calls.differing:
        raise SystemExit(f"{len(wrong)} answers are no documents of their schemas, such as {(wrong or calls.differing)[0]}")


if __name__ == "__main__":
    parser_of("benchmarks.constrained", __doc__).parse_args()
    asyncio.run(main())
