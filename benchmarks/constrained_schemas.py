"""JSON schemas as applications have them, made by number: all different and bounded, so that an output ends before max_tokens."""

import random
from collections.abc import Callable

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
