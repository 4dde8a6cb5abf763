"""`pdmesh loadtest report result.json`: shows the tables, and the page, of an earlier result."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path

from pdmesh.loadtest import result
from pdmesh.loadtest.reports import html as reports_html
from pdmesh.loadtest.reports import text
from pdmesh.terminal import show

EXIT_USAGE = 2


@dataclass(frozen=True)
class Options:
    """Show a result of the load test again: pdmesh loadtest report result.json --html report.html."""

    result: str = field(default="", metadata={"help": "file of the result, also as a bare word", "positional": True})
    html: str = field(default="", metadata={"help": "write the page to this file"})

    def validate(self) -> None:
        """Raise ValueError that names the field."""
        if not self.result:
            raise ValueError("result: is missing; name a file, such as pdmesh loadtest report result.json")


def run(options: Options) -> int:
    """Run the command; return 0 when it was shown."""
    try:
        measured = result.read(options.result)
        if options.html:
            Path(options.html).write_text(reports_html.page(measured), encoding="utf-8")
    except (ValueError, OSError) as error:
        print(f"pdmesh loadtest report: {error}", file=sys.stderr)
        return EXIT_USAGE
    show(*text.lines(measured))
    return 0
