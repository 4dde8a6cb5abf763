"""`pdmesh loadtest compare a.json b.json`: shows what changed between two results, and how sure that is; of more, all side by
side.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from pdmesh.loadtest import result
from pdmesh.loadtest.compare import compare
from pdmesh.loadtest.reports import comparison, text
from pdmesh.loadtest.result import Result
from pdmesh.terminal import show, table

EXIT_WORSE, EXIT_USAGE, EXIT_INVALID = 1, 2, 5


@dataclass(frozen=True)
class Options:
    """Compare results of the load test: pdmesh loadtest compare a.json b.json --html out.html; also more than two."""

    a: str = field(default="", metadata={"help": "file of the first result, also as a bare word", "positional": True})
    b: str = field(default="", metadata={"help": "file of the second, also as a bare word", "positional": True})
    more: tuple[str, ...] = field(default=(), metadata={"help": "files of further ones, also as bare words", "positional": True})
    html: str = field(default="", metadata={"help": "write a page with all of them to this file"})
    json: bool = field(default=False, metadata={"help": "print JSON"})
    fail_if_worse: bool = field(default=False, metadata={"help": "exit with 1 if anything is surely worse in the second"})

    def validate(self) -> None:
        """Raise ValueError that names the field."""
        for name in ("a", "b"):
            if not getattr(self, name):
                raise ValueError(f"{name}: is missing; name two files, such as pdmesh loadtest compare a.json b.json")
        if self.more and self.fail_if_worse:
            raise ValueError("fail_if_worse: compares two results; leave out the further ones")


def run(options: Options) -> int:
    """Run the command; return 0: compared; 1: something is worse, with --fail-if-worse; 5: with it, these results do not tell."""
    try:
        read = _read((options.a, options.b, *options.more))
        if options.html:
            Path(options.html).write_text(comparison.page(read), encoding="utf-8")
    except (ValueError, OSError) as error:
        print(f"pdmesh loadtest compare: {error}", file=sys.stderr)
        return EXIT_USAGE
    if options.more:
        _show_all(read, as_json=options.json)
        return 0
    a, b = read.values()
    differences = compare(a, b)
    if options.json:
        extra = ("better", "worse", "relative")
        rows = [{**asdict(item), **{name: getattr(item, name) for name in extra}} for item in differences]
        print(json.dumps({"doubts": _doubts(a, b), "differences": rows}))
    else:
        show(*_doubts(a, b), text.comparison_table(differences))
    if options.fail_if_worse and not all(one.valid and not one.interrupted for one in (a, b)):
        return EXIT_INVALID
    return EXIT_WORSE if options.fail_if_worse and any(item.worse for item in differences) else 0


def _read(files: Sequence[str]) -> dict[str, Result]:
    """Return the results by the names of the files, made unique."""
    named: dict[str, Result] = {}
    for file in files:
        name = Path(file).stem
        named[name if name not in named else f"{name} ({len(named) + 1})"] = result.read(file)
    return named


def _show_all(read: Mapping[str, Result], *, as_json: bool) -> None:
    head, rows = comparison.overview(read)
    if as_json:
        print(json.dumps([dict(zip(("name", *head[1:]), row, strict=True)) for row in rows]))
    else:
        show(table(head, rows))


def _doubts(a: Result, b: Result) -> list[str]:
    """Return why the two may not be comparable."""
    lines = [f"{name} is not valid: {reason}" for name, of in (("a", a), ("b", b)) for reason in of.reasons]
    lines += [f"{name} was interrupted" for name, of in (("a", a), ("b", b)) if of.interrupted]
    if a.model != b.model:
        lines.append(f"model differs: {a.model} | {b.model}")
    if (a.objectives, a.objectives_by_class) != (b.objectives, b.objectives_by_class):
        lines.append(f"the objectives differ: {a.objectives} | {b.objectives}")
    # Where results are written and how they are shown is irrelevant; the target is what one compares.
    apart = {"target", "output", "html", "json", "progress", "goals.objectives", "what.seed"}
    differing = [name for name in a.settings if name not in apart and a.settings[name] != b.settings.get(name)]
    return lines + [f"{name} differs: {a.settings[name]} | {b.settings.get(name)}" for name in differing]
