"""`pdmesh loadtest compare a.json b.json`: what changed between two results, and how sure that is."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass, field

from pdmesh.loadtest import report_text, result
from pdmesh.loadtest.compare import compare
from pdmesh.loadtest.result import Result
from pdmesh.render import palette

EXIT_WORSE, EXIT_USAGE = 1, 2


@dataclass(frozen=True)
class Options:
    """Compare two results of the load test: pdmesh loadtest compare a.json b.json."""

    a: str = field(default="", metadata={"help": "file of the first result, also as a bare word", "positional": True})
    b: str = field(default="", metadata={"help": "file of the second, also as a bare word", "positional": True})
    json: bool = field(default=False, metadata={"help": "print JSON"})
    fail_if_worse: bool = field(default=False, metadata={"help": "exit with 1 if anything is surely worse in the second"})

    def validate(self) -> None:
        """Raises ValueError that names the field."""
        for name in ("a", "b"):
            if not getattr(self, name):
                raise ValueError(f"{name}: is missing; name two files, such as pdmesh loadtest compare a.json b.json")


def run(options: Options) -> int:
    """0: compared; 1: something is worse, and that was to fail."""
    try:
        a, b = result.read(options.a), result.read(options.b)
    except ValueError as error:
        print(f"pdmesh loadtest compare: {error}", file=sys.stderr)
        return EXIT_USAGE
    differences = compare(a, b)
    if options.json:
        extra = ("better", "worse", "relative")
        print(json.dumps([{**asdict(item), **{name: getattr(item, name) for name in extra}} for item in differences]))
    else:
        print("\n".join([*_doubts(a, b), *report_text.comparison_lines(differences, palette(sys.stdout))]))
    return EXIT_WORSE if options.fail_if_worse and any(item.worse for item in differences) else 0


def _doubts(a: Result, b: Result) -> list[str]:
    """Why the two may not be comparable."""
    lines = [f"{name} is not valid: {reason}" for name, of in (("a", a), ("b", b)) for reason in of.reasons]
    if (a.objectives, a.objectives_by_class) != (b.objectives, b.objectives_by_class):
        lines.append(f"the objectives differ: {a.objectives} | {b.objectives}")
    # Where results are written and how they are shown changes nothing; the target is what one compares.
    apart = {"target", "output", "html", "json", "progress", "goals.objectives", "what.seed"}
    differing = [name for name in a.settings if name not in apart and a.settings[name] != b.settings.get(name)]
    return lines + [f"{name} differs: {a.settings[name]} | {b.settings.get(name)}" for name in differing]
