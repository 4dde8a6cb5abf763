"""Texts to ask a model about, made by code from a seeded generator: the same seed gives the same text, for ever."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
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


# 200 prompts of varied kinds and lengths, the same ones every time: what speculation must not change a token of.
#
# Written for this purpose or made by code (`texts.py`), in ChatML or as plain text to go on with; from 1 to about 1 500 tokens.


@dataclass(frozen=True)
class Prompt:
    kind: str
    text: str


def chat(*turns: str) -> str:
    """ChatML: the user's and the assistant's turns in alternation, the user's first and last; then it is the assistant's turn."""
    roles = ("user", "assistant")
    told = "".join(f"<|im_start|>{roles[number % 2]}\n{turn}<|im_end|>\n" for number, turn in enumerate(turns))
    return told + "<|im_start|>assistant\n"


_QUESTIONS = (
    *("What is the capital of {city}'s country?", "Why is the sky blue?", "How do {things} work?", "Who invented the telescope?"),
    *("Is it safe to eat snow?", "What should I pack for a week in {city}?", "How far is the moon?", "Why do cats purr?"),
    *("Can you recommend a book about {hobby}?", "What is the difference between weather and climate?"),
    *("How do I remove wax from a tablecloth?", "What does a prime minister do?", "Why does bread rise?"),
    *("How many people live in {city}?", "What is a good name for a shop that sells {things}?", "When do swallows leave?"),
    *(
        "How do I learn {hobby} in a month?",
        "Do plants sleep?",
        "What would {name} need to repair {things}?",
        "Why is glass clear?",
    ),
)
_TOPICS = (
    *("how a lock on a canal works", "why leaves turn red", "what inflation is", "how vaccines teach the body"),
    *("what a compiler does", "why the tides come twice a day", "how a violin makes its sound", "what a black hole is"),
    *("how a bill becomes a law", "why we dream"),
)
_RAW_CODE = (
    *("def fibonacci(n):\n", "class Stack:\n    def __init__(self):\n", "import csv\n\ndef read_{things}(path):\n"),
    *("SELECT name, COUNT(*) FROM {things} WHERE", "#include <stdio.h>\n\nint main(void) {{\n    printf("),
    *("function sum{number}(values) {{\n  let total = 0;\n", "for {hobby} in range({number}):\n    if {hobby} % 2 == 0:\n"),
    *("fn main() {{\n    let numbers = vec![", '<ul class="{things}">\n  <li>', 'git commit -m "Fix the {things}"\ngit'),
)
_WANTED_CODE = (
    *(
        "reverses a string",
        "counts the words in a file",
        "finds the largest of three numbers",
        "checks whether a year is a leap year",
    ),
    *("merges two sorted lists", "counts vowels", "prints a triangle of stars", "converts Celsius to Fahrenheit"),
    *("removes duplicates from a list", "computes a mean and a median"),
)
_TRANSLATIONS = ("German", "French", "Spanish", "Italian", "Portuguese")
_FOREIGN = (
    *(
        "Die Hauptstadt von Deutschland ist",
        "Les trois mousquetaires étaient en réalité quatre :",
        "日本の首都は東京です。東京の人口は",
    ),
    *("¿Cuál es la diferencia entre una célula animal y una vegetal?", "Привет! Расскажи мне о погоде в Москве."),
    *("中国的首都是北京。北京是一座", "La ricetta del pane è semplice:", "O rio corre para o mar, e o mar", "서울은 대한민국의"),
    *(
        "Η θάλασσα ήταν ήρεμη και",
        "مرحبا، كيف حالك اليوم؟",
        "Wie macht man Käse aus Milch?",
        "Żółw i zając biegli razem",
        "Türkiye'nin en büyük şehri",
    ),
)
_ODD = (
    *("🙂🙃🙂🙃🙂", "👩‍🚀🌍🎉 Write a story with these:", "\x00\x01\x02 bytes \x7f", "ﬁne ligatures — and “quotes” … ½ ¾ ⅞"),
    *("Z̷a̶l̵g̸o̶ text", "tabs\tand\r\nlines\n\n\n", "   ", "🇩🇪🇫🇷🇯🇵 are the flags of"),
)
_TINY = ("a", "The", "\n", "1", "{", "<|im_start|>")


def _slots(random: Random, text: str) -> str:
    return text.format(
        city=random.choice(CITIES),
        things=random.choice(THINGS),
        hobby=random.choice(HOBBIES),
        name=person(random),
        number=random.randint(2, 90),
    )


def _question(random: Random, number: int) -> str:
    return chat(_slots(random, _QUESTIONS[number % len(_QUESTIONS)]))


def _story(random: Random, number: int) -> str:
    hero, city = person(random), random.choice(CITIES)
    if number % 3 == 0:
        return f"Once upon a time in {city} there lived a collector of {random.choice(THINGS)} whose name was {hero}. One morning"
    form = ("a short story", "a poem", "the first page of a novel")[number % 3]
    return chat(f"Write {form} about {hero}, who loves {random.choice(HOBBIES)} and has lost the way in {city}.")


def _explanation(random: Random, number: int) -> str:
    reader = random.choice(("a child", "a student", "somebody who is in a hurry"))
    return chat(f"Explain to {reader} {_TOPICS[number % len(_TOPICS)]}.")


def _raw_code(random: Random, number: int) -> str:
    return _slots(random, _RAW_CODE[number % len(_RAW_CODE)])


def _wanted_code(random: Random, number: int) -> str:
    language = random.choice(("Python", "JavaScript", "C"))
    return chat(f"Write a function in {language} that {_WANTED_CODE[number % len(_WANTED_CODE)]}.")


def _code_edit(random: Random, number: int) -> str:
    source, names = module(random, number)
    orders = (
        f"Rename the class `{names['Keeper']}` to `Store` and return the whole file.",
        f"Rename the method `{names['add']}` to `put` and return the whole file.",
        f'Change the message "{names["full"]}" to "no room" and return the whole file.',
        "Return this file unchanged.",
        "Add a docstring to every method and return the whole file.",
    )
    return chat(f"{orders[number % len(orders)]}\n\n{fenced(source, 'python')}")


def _json(random: Random, number: int) -> str:
    rows = records(random, random.randint(2, 5))
    orders = ("with an indent of two spaces", "on one line", "as one record a line", "with the keys in alphabetical order")
    given = as_json(rows, indent=2 if number % 2 else None)
    return chat(f"Write this JSON {orders[number % len(orders)]}:\n\n{fenced(given, 'json')}")


def _quotes(random: Random, number: int) -> str:
    orders = (
        "Summarize the article with quotes from it.",
        "Quote the three most important sentences.",
        "What did people say in it?",
    )
    return chat(f"{article(random, number, random.randint(4, 10))}\n\n{orders[number % len(orders)]}")


def _list(random: Random, number: int) -> str:
    return chat(
        f"List {random.randint(5, 20)} {('uses of', 'facts about', 'names for', 'kinds of')[number % 4]} {random.choice(THINGS)}."
    )


def _translation(random: Random, number: int) -> str:
    language = _TRANSLATIONS[number % len(_TRANSLATIONS)]
    return chat(f"Translate to {language}:\n\n{article(random, number, 1 + number // len(_TRANSLATIONS))}")


def _maths(random: Random, number: int) -> str:
    a, b, c = (random.randint(3, 99) for _ in range(3))
    things = random.choice(THINGS)
    tasks = (
        f"What is {a} * {b} + {c}?",
        f"{person(random)} has {a + b} {things} and gives away {b}. How many are left? Think step by step.",
        f"Solve {a}x + {b} = {c}.",
        f"Q: {a} + {b} = ?\nA: {a + b}\nQ: {b} + {c} = ?\nA: {b + c}\nQ: {a} + {c} = ?\nA:",
        f"Count from {a} to {a + 30}, separated by commas.",
    )
    task = tasks[number % len(tasks)]
    return task if task.startswith("Q:") else chat(task)


def _table(random: Random, number: int) -> str:
    rows = flat_records(random, random.randint(3, 8))
    if number % 2:
        return chat(f"Make a Markdown table of this CSV:\n\n{fenced(as_csv(rows), 'csv')}")
    return chat(f"Make CSV of this JSON:\n\n{fenced(as_json(rows), 'json')}")


def _repetition(random: Random, number: int) -> str:
    word = random.choice(THINGS)
    tasks = (f"Repeat the word {word} forty times.", f"Write 'I will not lose my {word}' again and again.")
    line = f"{number}. {word} and {random.choice(HOBBIES)}; "
    return (line * 12).strip() if number % 3 == 2 else chat(tasks[number % 3])


def _turns(random: Random, number: int) -> str:
    name, city, hobby = person(random), random.choice(CITIES), random.choice(HOBBIES)
    turns = [f"Hello, I am {name} from {city}.", f"Nice to meet you, {name}! How is life in {city}?"]
    turns += [f"Quiet. I spend my days with {hobby}.", f"That sounds lovely. What do you like about {hobby}?"] * (number % 3)
    return chat(
        *turns, random.choice(("What is my name, and where am I from?", "Write a letter to me.", "Tell me a joke about me."))
    )


def _long(random: Random, number: int) -> str:
    if number % 2:
        files = "\n\n\n".join(module(random, number + other)[0] for other in range(2 + number // 2))
        return chat(f"Explain what these classes have in common.\n\n{fenced(files, 'python')}")
    reports = "\n\n".join(article(random, number + other) for other in range(3 + number // 2))
    return chat(f"{reports}\n\nWhat do these articles have in common?")


def _from(texts: tuple[str, ...], *, chatting: bool) -> Callable[[Random, int], str]:
    return lambda random, number: chat(texts[number]) if chatting and number % 2 else texts[number]


_KINDS: tuple[tuple[str, int, Callable[[Random, int], str]], ...] = (
    ("question", 20, _question),
    ("story", 15, _story),
    ("explanation", 10, _explanation),
    ("raw code", 10, _raw_code),
    ("wanted code", 10, _wanted_code),
    ("code edit", 15, _code_edit),
    ("json", 15, _json),
    ("quotes", 15, _quotes),
    ("list", 8, _list),
    ("translation", 10, _translation),
    ("maths", 10, _maths),
    ("table", 8, _table),
    ("repetition", 8, _repetition),
    ("turns", 10, _turns),
    ("long", 8, _long),
    ("foreign", 14, _from(_FOREIGN, chatting=True)),
    ("odd", 8, _from(_ODD, chatting=True)),
    ("tiny", 6, _from(_TINY, chatting=False)),
)


def varied_prompts(seed: int = 8) -> list[Prompt]:
    """The 200, by kind."""
    made = []
    for kind, count, make in _KINDS:
        random = Random(f"{seed} {kind}")  # so that one kind may change without the others
        made += [Prompt(kind, make(random, number)) for number in range(count)]
    return made
