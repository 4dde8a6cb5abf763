"""The parts of a Grafana dashboard. Pure: values in, what Grafana reads out."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

COLUMNS = 24
SCHEMA_VERSION = 39
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
Kind = Literal["timeseries", "stat", "heatmap", "gauge", "table"]


@dataclass(frozen=True)
class Query:
    """Hold a query. `legend` may name labels: {{instance}}. `exemplars`: dots that link to traces."""

    expr: str
    legend: str = ""
    exemplars: bool = False


@dataclass(frozen=True)
class Panel:
    """Describe one panel. `unit` is one of Grafana's: s, percentunit, reqps, Bps, bytes, short."""

    title: str
    queries: Sequence[Query]
    unit: str = "short"
    kind: Kind = "timeseries"
    width: int = 8
    height: int = 8
    text: str = ""
    stacked: bool = False
    at_most: float | None = None
    thresholds: Sequence[tuple[float, str]] = ()


@dataclass(frozen=True)
class Row:
    """Hold panels under a headline, from left to right."""

    title: str
    panels: Sequence[Panel]


@dataclass(frozen=True)
class Variable:
    """Describe a choice above the panels: the values of `label` of `metric`."""

    name: str
    label: str
    metric: str


@dataclass(frozen=True)
class Dashboard:
    """Describe a dashboard. `name` is its uid and the name of its file."""

    name: str
    title: str
    rows: Sequence[Row]
    variables: Sequence[Variable] = ()
    text: str = ""
    links: Mapping[str, str] = field(default_factory=dict)

    @property
    def panels(self) -> list[Panel]:
        """Return all panels."""
        return [panel for row in self.rows for panel in row.panels]

    def to_json(self) -> str:
        """Return the file that Grafana loads."""
        return json.dumps(_dashboard(self), indent=1, ensure_ascii=False)


def _dashboard(dashboard: Dashboard) -> dict[str, Any]:
    return {
        "uid": dashboard.name,
        "title": dashboard.title,
        "description": dashboard.text,
        "tags": ["pdmesh"],
        "schemaVersion": SCHEMA_VERSION,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "links": [{"type": "dashboards", "tags": ["pdmesh"], "title": "pdmesh", "asDropdown": True, "includeVars": True}],
        "templating": {"list": [_source_variable(), *map(_variable, dashboard.variables)]},
        "annotations": {"list": []},
        "panels": _placed(dashboard.rows),
    }


def _placed(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return the rows from top to bottom; a panel that does not fit in its line begins another."""
    placed, y = list[dict[str, Any]](), 0
    for row in rows:
        placed.append({"type": "row", "title": row.title, "collapsed": False, "panels": [], "id": len(placed) + 1})
        placed[-1]["gridPos"] = {"x": 0, "y": y, "w": COLUMNS, "h": 1}
        x, y, tallest = 0, y + 1, 0
        for panel in row.panels:
            if x + panel.width > COLUMNS:
                x, y, tallest = 0, y + tallest, 0
            placed.append({**_panel(panel, len(placed) + 1), "gridPos": {"x": x, "y": y, "w": panel.width, "h": panel.height}})
            x, tallest = x + panel.width, max(tallest, panel.height)
        y += tallest
    return placed


def _panel(panel: Panel, number: int) -> dict[str, Any]:
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.text,
        "datasource": _SOURCE,
        "targets": [_target(query, panel.kind, chr(ord("A") + index)) for index, query in enumerate(panel.queries)],
        "fieldConfig": {"defaults": _defaults(panel), "overrides": []},
        "options": _options(panel.kind),
    }


def _target(query: Query, kind: Kind, ref: str) -> dict[str, Any]:
    target: dict[str, Any] = {
        "refId": ref,
        "datasource": _SOURCE,
        "expr": query.expr,
        "legendFormat": query.legend or "__auto",
        "exemplar": query.exemplars,
    }
    if kind == "heatmap":
        return {**target, "format": "heatmap"}
    if kind in ("stat", "gauge", "table"):
        return {**target, "instant": True, "range": False, **({"format": "table"} if kind == "table" else {})}
    return target


def _defaults(panel: Panel) -> dict[str, Any]:
    defaults: dict[str, Any] = {"unit": panel.unit, "min": 0}
    if panel.at_most is not None:
        defaults["max"] = panel.at_most
    if panel.kind == "timeseries":
        fill = 40 if panel.stacked else 8
        stacking = {"mode": "normal" if panel.stacked else "none", "group": "A"}
        defaults["custom"] = {"lineWidth": 1, "fillOpacity": fill, "stacking": stacking, "showPoints": "never"}
    if panel.thresholds:
        steps = [{"value": None if value == float("-inf") else value, "color": color} for value, color in panel.thresholds]
        defaults["thresholds"] = {"mode": "absolute", "steps": steps}
    return defaults


def _options(kind: Kind) -> dict[str, Any]:
    if kind == "timeseries":
        legend = {"displayMode": "table", "placement": "bottom", "calcs": ["lastNotNull", "max"], "showLegend": True}
        return {"legend": legend, "tooltip": {"mode": "multi", "sort": "desc"}}
    if kind == "heatmap":
        return {
            "calculate": False,
            "color": {"scheme": "Blues", "mode": "scheme"},
            "yAxis": {"unit": "s"},
            "exemplars": {"color": "red"},
        }
    if kind in ("stat", "gauge"):
        return {"reduceOptions": {"calcs": ["lastNotNull"]}, "orientation": "auto", "textMode": "auto", "colorMode": "value"}
    return {}


def _source_variable() -> dict[str, Any]:
    return {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Prometheus", "current": {}}


def _variable(variable: Variable) -> dict[str, Any]:
    query = f"label_values({variable.metric}, {variable.label})"
    return {
        "name": variable.name,
        "type": "query",
        "datasource": _SOURCE,
        "definition": query,
        "query": {"query": query, "refId": variable.name},
        "includeAll": True,
        "allValue": ".*",
        "multi": True,
        "refresh": 2,
        "sort": 1,
        "current": {"selected": True, "text": ["All"], "value": ["$__all"]},
    }
