"""All names that processes show, as a table for docs/metrics.md. Imports what they import: engines, too."""

from __future__ import annotations

from collections.abc import Iterable

from pdmesh.autoscaler import instruments as autoscaler
from pdmesh.runtime.telemetry.metrics import Instrument
from pdmesh.worker import instruments as worker
from router.telemetry import instruments as router

MARK = "<!-- made by python -m pdmesh.monitoring -->\n"
CATALOGUE = {"Router": router.ALL, "Worker": worker.ALL, "Autoscaler": autoscaler.ALL}


def tables() -> str:
    """One for each kind of process, in Markdown."""
    return "".join(f"\n### {title}\n\n{_table(instruments)}" for title, instruments in CATALOGUE.items())


def with_tables(page: str) -> str:
    """The page, with the tables of now behind its MARK."""
    return page.partition(MARK)[0] + MARK + tables()


def _table(instruments: Iterable[Instrument]) -> str:
    rows = [f"| `{_shown(each)}` | {each.kind.value} | {_labels(each)} | {each.help} |\n" for each in instruments]
    return "| name | kind | labels | |\n| --- | --- | --- | --- |\n" + "".join(rows)


def _shown(instrument: Instrument) -> str:
    return instrument.samples[0] if len(instrument.samples) == 1 else instrument.family


def _labels(instrument: Instrument) -> str:
    return ", ".join(f"`{label}`" for label in instrument.label_names)
