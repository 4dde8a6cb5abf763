"""Asks a port for metrics, as Prometheus does, and reads the answer."""

from __future__ import annotations

import urllib.request
from dataclasses import dataclass

from prometheus_client.openmetrics.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

OPENMETRICS = "application/openmetrics-text; version=1.0.0"


@dataclass(frozen=True)
class Page:
    """One answer. `samples` by name."""

    kind: str
    text: str

    @property
    def samples(self) -> list[Sample]:
        """All of an OpenMetrics answer. Raises ValueError for a text that is none."""
        families = text_string_to_metric_families(self.text)  # type: ignore[no-untyped-call]
        return [sample for family in families for sample in family.samples]

    def values(self, name: str, **labels: str) -> list[float]:
        """Of the samples of that name that have these labels."""
        return [each.value for each in self.samples if each.name == name and labels.items() <= each.labels.items()]

    def value(self, name: str, **labels: str) -> float:
        """Their sum. KeyError without any."""
        found = self.values(name, **labels)
        if not found:
            raise KeyError(f"no sample {name} with {labels}")
        return sum(found)


def scrape(url: str, accept: str = OPENMETRICS) -> Page:
    """Blocks. Raises urllib.error.HTTPError."""
    request = urllib.request.Request(url, headers={"Accept": accept})
    with urllib.request.urlopen(request, timeout=10) as answer:
        return Page(answer.headers["Content-Type"], answer.read().decode())
