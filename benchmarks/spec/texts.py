"""Texts to ask a model about, made by code from a seeded generator: the same seed gives the same text, for ever."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping
from random import Random

FIRST_NAMES = (
    *("Marta", "Jonas", "Aiko", "Tom", "Beata", "Ravi", "Chidi", "Elif", "Noor", "Pavel", "Lucia", "Sven", "Amara", "Hugo"),
    *("Yuki", "Greta", "Omar", "Ines", "Kofi", "Maeve"),
)
LAST_NAMES = (
    *("Oliveira", "Berg", "Tanaka", "Reilly", "Nowak", "Iyer", "Okafor", "Demir", "Haddad", "Novak", "Ferri", "Lind", "Diallo"),
    *("Marchand", "Mori", "Vogel", "Aziz", "Duarte", "Mensah", "Byrne"),
)
CITIES = (
    *("Porto", "Uppsala", "Sendai", "Galway", "Gdynia", "Mysore", "Enugu", "Izmir", "Tripoli", "Brno", "Parma", "Turku", "Dakar"),
    *("Rouen", "Nara", "Bremen", "Fez", "Faro", "Kumasi", "Cork"),
)
HOBBIES = (
    "tea",
    "chess",
    "rowing",
    "maps",
    "bread",
    "fiddle",
    "boats",
    "kites",
    "beetles",
    "clocks",
    "cheese",
    "stamps",
    "moths",
)
THINGS = (
    "lanterns",
    "barrels",
    "bicycles",
    "violins",
    "globes",
    "kettles",
    "ladders",
    "telescopes",
    "carpets",
    "anchors",
    "drums",
)


def person(random: Random) -> str:
    return f"{random.choice(FIRST_NAMES)} {random.choice(LAST_NAMES)}"


def records(random: Random, count: int) -> list[dict[str, object]]:
    return [
        {
            "id": 100 + number * random.randint(1, 9),
            "name": person(random),
            "city": random.choice(CITIES),
            "age": random.randint(19, 80),
            "hobbies": random.sample(HOBBIES, random.randint(1, 3)),
        }
        for number in range(1, count + 1)
    ]


def flat_records(random: Random, count: int) -> list[dict[str, object]]:
    return [{key: value for key, value in record.items() if key != "hobbies"} for record in records(random, count)]


def as_csv(rows: list[dict[str, object]]) -> str:
    out = io.StringIO()
    writer = csv.DictWriter(out, fieldnames=list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue().rstrip("\n")


def as_json(value: object, indent: int | None = None) -> str:
    return json.dumps(value, indent=indent, ensure_ascii=False, separators=None if indent else (",", ":"))


def fenced(text: str, language: str = "") -> str:
    return f"```{language}\n{text}\n```"


# What a small class keeps: its name, its things, what one is called, the limit, and words for adding and taking away.
_KEEPERS = (
    ("Inventory", "items", "name", "capacity", "add", "remove", "the warehouse is full"),
    ("Library", "books", "title", "num_shelves", "lend", "bring_back", "the shelves are full"),
    ("Garage", "cars", "plate", "num_places", "park", "leave", "there is no place left"),
    ("Playlist", "songs", "song", "max_length", "append", "drop", "the playlist is too long"),
    ("Pantry", "jars", "label", "num_boards", "store", "take", "the pantry is full"),
    ("Kennel", "dogs", "dog", "num_baskets", "welcome", "hand_over", "all baskets are taken"),
    ("Orchard", "trees", "kind", "num_rows", "plant", "fell", "the orchard has no more room"),
    ("Fleet", "ships", "ship", "num_berths", "moor", "cast_off", "the harbour is full"),
)
_MODULE = '''class {Keeper}:
    """Keeps count of {things}."""

    def __init__(self, {limit}):
        self.{limit} = {limit}
        self.{things} = {{}}

    def {add}(self, {name}, count):
        if self.total() + count > self.{limit}:
            raise ValueError("{full}")
        self.{things}[{name}] = self.{things}.get({name}, 0) + count

    def {remove}(self, {name}, count):
        if self.{things}.get({name}, 0) < count:
            raise KeyError(f"not enough of {{{name}}}")
        self.{things}[{name}] -= count
        if self.{things}[{name}] == 0:
            del self.{things}[{name}]
{more}
    def total(self):
        return sum(self.{things}.values())'''
_MORE = (
    """
    def report(self):
        for {name}, count in sorted(self.{things}.items()):
            print(f"{{{name}}}: {{count}}")
""",
    """
    def most_common(self):
        return max(self.{things}, key=self.{things}.get)
""",
    """
    def merge(self, other):
        for {name}, count in other.{things}.items():
            self.{add}({name}, count)
""",
    """
    def share(self, {name}):
        if not self.{things}:
            return 0.0
        return self.{things}.get({name}, 0) / self.total()
""",
)


def module(random: Random, keeper: int) -> tuple[str, Mapping[str, str]]:
    """A class in Python, and what it calls things: Keeper, things, name, limit, add, remove, full."""
    names = dict(
        zip(("Keeper", "things", "name", "limit", "add", "remove", "full"), _KEEPERS[keeper % len(_KEEPERS)], strict=True)
    )
    more = "".join(part.format(**names) for part in random.sample(_MORE, random.randint(1, 3)))
    return _MODULE.format(more=more, **names), names


_NEWS = (
    "The harbour of {city} froze on the {day} of January, for the first time in {years} years.",
    "Fishing boats lay fast between the piers, and the ferry to the islands was cancelled until further notice.",
    'The mayor, {mayor}, asked the navy for an icebreaker. "{number} people on the islands have food for nine days," she said.',
    "The navy answered that its only icebreaker was under repair in {other_city}.",
    "Islanders began to carry supplies across the ice on sledges.",
    "The coast guard warned that the ice was less than twelve centimetres thick near the channel.",
    "On Thursday a sledge with {things} broke through, but its driver was pulled out unhurt.",
    '"I heard it crack, and then I was in the water," said {witness}, who had crossed the sound every winter.',
    "By the weekend the wind had turned to the west, and the ice began to break up by itself.",
    "The first ferry left on Sunday with {number} passengers and {years} crates of {things}.",
)
_MUSEUM = (
    "The museum of {things} in {city} will close its doors in spring after {years} years.",
    "It was founded by {witness}, a retired teacher, who had collected {number} of them in a barn.",
    "Visitors came from as far as {other_city}, at first by train and later by bus.",
    '"We never wanted to be large," said the director, {mayor}, "we wanted to be complete."',
    "In its best year the museum counted {number} visitors on a single day.",
    "The roof has leaked since the storm of the {day} of October, and the town has no money for another one.",
    "Several pieces will go to the university, which has promised to show them to everybody.",
    '"A thing that nobody looks at is only a thing," the director added.',
    "The barn itself will be sold, and may become a bakery.",
    "Until the end of March admission is free on weekdays.",
)
_RIVER = (
    "Engineers in {city} have finished a bridge that can be folded up in less than {day} minutes.",
    "It replaces a ferry that had carried {things} and people across the river for {years} years.",
    'The chief engineer, {mayor}, called it "the longest hinge in the country".',
    "The bridge cost less than expected, because its steel came from a crane that had been taken down in {other_city}.",
    "Ships announce themselves by radio, and wait at most a quarter of an hour.",
    "On the first day {number} bicycles were counted, and two horses.",
    '"I will miss the bell of the ferry," said {witness}, who has sold coffee at the landing since her youth.',
    "The ferry will be kept as a restaurant, without its engine.",
    "A second bridge of the same kind is planned further upstream.",
    "Its opening is expected in {years} months.",
)
_ARTICLES = (_NEWS, _MUSEUM, _RIVER)


def article(random: Random, kind: int, num_sentences: int = 10) -> str:
    """A report of some sentences, with what people said in it."""
    cities = random.sample(CITIES, 2)
    slots = {
        "city": cities[0],
        "other_city": cities[1],
        "mayor": person(random),
        "witness": person(random),
        "day": random.choice(("third", "fifth", "ninth")) if kind % 3 != 2 else random.choice(("three", "five", "nine")),
        "years": random.randint(12, 60),
        "number": random.randint(120, 900),
        "things": random.choice(THINGS),
    }
    return " ".join(sentence.format(**slots) for sentence in _ARTICLES[kind % 3][:num_sentences])
