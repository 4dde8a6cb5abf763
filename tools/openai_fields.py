"""The table of docs/openai.md that shows each field of each endpoint: supported, ignored or refused, and why.

`python -m tools.openai_fields` makes it from the types of the bodies (router/api/openai/bodies.py); with `--check` it compares
and exits 1 when the table is stale.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from pydantic import TypeAdapter

from router.api.http.docs_page import Row, rows
from router.api.http.types import Body
from router.api.openai import bodies, messages

PAGE = Path(__file__).parents[1] / "docs/openai.md"
BEGIN, END = "<!-- fields: made by python -m tools.openai_fields -->", "<!-- end of fields -->"
ENDPOINTS: dict[str, tuple[type[Body], ...]] = {
    "chat": (bodies.ChatCompletionRequest,),
    "completions": (bodies.CompletionRequest,),
    "tokenize": (bodies.TokenizeTextRequest, bodies.TokenizeChatRequest),
    "detokenize": (bodies.DetokenizeRequest,),
    "messages": (messages.Message, messages.AssistantMessage, messages.ToolMessage),
}
"""The columns. A message is no endpoint, but its fields are as many as those of one."""
MARKS = {"": "yes", "ignored": "ignored", "unsupported": "refused"}


def table() -> str:
    """Return the table. Fields that all of their columns support come first."""
    found = {column: {row.name: row for row in _rows(kinds)} for column, kinds in ENDPOINTS.items()}
    names = dict.fromkeys(name for of in found.values() for name in of)
    lines = [_line(name, [of.get(name) for of in found.values()]) for name in names]
    ordered = sorted(lines, key=lambda line: ("| refused |" in line, "| ignored |" in line))
    head = ["| field | " + " | ".join(ENDPOINTS) + " | |", "| --- |" + " --- |" * (len(ENDPOINTS) + 1)]
    return "\n".join(["", *head, *ordered, ""])


def _rows(kinds: Sequence[type[Body]]) -> Iterator[Row]:
    """Yield the fields of a body that has one of several forms: a form that supports a field goes before one that refuses it."""
    found: dict[str, Row] = {}
    for kind in kinds:
        schema = TypeAdapter(kind).json_schema(ref_template="#/components/schemas/{model}")
        for row in rows(schema, schema.get("$defs", {})):
            if row.name not in found or (found[row.name].mark and not row.mark):
                found[row.name] = row
    yield from found.values()


def _line(name: str, columns: Sequence[Row | None]) -> str:
    cells = ["" if row is None else MARKS[row.mark] for row in columns]
    notes = {column: _note(row) for column, row in zip(ENDPOINTS, columns, strict=True) if row is not None}
    if len({*notes.values()}) > 1:
        said = "; ".join(f"{column}: {note}" for column, note in notes.items() if note)
    else:
        said = next(iter(notes.values()))
    return f"| `{name}` | {' | '.join(cells)} | {said} |"


def _note(row: Row) -> str:
    note = row.description.replace("\n", " ").replace("|", "\\|").rstrip(".")
    if row.mark != "unsupported" or not row.harmless:
        return note
    return f"{note} (accepted: {', '.join(f'`{json.dumps(value)}`' for value in row.harmless)})"


def page() -> str:
    """Return what has to stand in docs/openai.md. Raises ValueError where the marks are missing."""
    before, begin, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{PAGE.name}: {BEGIN} or {END} is missing")
    return f"{before}{BEGIN}{table()}{END}{after}"


def main() -> None:
    """Write the page, or with `--check` only compare."""
    made = page()
    is_fresh = made == PAGE.read_text(encoding="utf-8")
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(made, encoding="utf-8")
    elif not is_fresh:
        raise SystemExit("docs/openai.md: the types of bodies are others: run `make stubs`")
    else:
        print("the table of fields in docs/openai.md is fresh")


if __name__ == "__main__":
    main()
