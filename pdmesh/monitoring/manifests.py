"""Writes rules and dashboards as files of Prometheus and Grafana, and as ConfigMaps of Kubernetes. Pure.

No YAML library is needed: texts are quoted as in JSON, which YAML reads.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable, Mapping

from pdmesh.autoscaler import metrics as autoscaler_metrics
from pdmesh.monitoring.panels import Dashboard
from pdmesh.monitoring.rules import Group, Rule
from pdmesh.runtime.telemetry.metrics import Instrument
from pdmesh.worker import metrics as worker_metrics
from router.telemetry import metrics as router_metrics

HEAD = "# Made by `python -m pdmesh.monitoring`, from pdmesh/monitoring/: change it there.\n"


def rules_file(groups: Iterable[Group]) -> str:
    """Return the groups as Prometheus reads them (`rule_files`)."""
    return "groups:\n" + "".join(map(_group, groups))


def rules_manifest(groups: Iterable[Group]) -> str:
    """Return a ConfigMap whose key is a file for Prometheus."""
    return HEAD + _config_map("pdmesh-prometheus-rules", {}, {"pdmesh.rules.yaml": rules_file(groups)})


def dashboards_manifest(dashboards: Iterable[Dashboard]) -> str:
    """Return a ConfigMap for each, with the label by which Grafana's sidecar finds it; and the provider by which a Grafana
    without one finds the folder."""
    found = [
        _config_map(f"pdmesh-dashboard-{dashboard.name.removeprefix('pdmesh-')}", {"grafana_dashboard": "1"}, _files(dashboard))
        for dashboard in dashboards
    ]
    return HEAD + "---\n".join([*found, _config_map("pdmesh-grafana-provisioning", {}, {"pdmesh.yaml": PROVISIONING})])


PROVISIONING = """\
# Mounted into /etc/grafana/provisioning/dashboards, with the dashboards' ConfigMaps below the path.
apiVersion: 1
providers:
  - name: pdmesh
    folder: pdmesh
    type: file
    options:
      path: /var/lib/grafana/dashboards/pdmesh
"""


def _files(dashboard: Dashboard) -> dict[str, str]:
    return {f"{dashboard.name}.json": dashboard.to_json() + "\n"}


def _config_map(name: str, labels: Mapping[str, str], files: Mapping[str, str]) -> str:
    more = "".join(f"    {key}: {json.dumps(value)}\n" for key, value in labels.items())
    data = "".join(f"  {key}: |\n{textwrap.indent(text, '    ')}" for key, text in files.items())
    return (
        f"apiVersion: v1\nkind: ConfigMap\nmetadata:\n  name: {name}\n  labels:\n    app.kubernetes.io/name: {name}\n"
        f"    app.kubernetes.io/part-of: pdmesh\n{more}data:\n{data}"
    )


def _group(group: Group) -> str:
    return f"  - name: {group.name}\n    interval: {group.interval}\n    rules:\n" + "".join(map(_rule, group.rules))


def _rule(rule: Rule) -> str:
    lines = [f"record: {rule.record}" if rule.record else f"alert: {rule.alert}", f"expr: {_quoted(rule.expr)}"]
    if rule.wait:
        lines.append(f"for: {rule.wait}")
    for name, pairs in (("labels", rule.labels), ("annotations", rule.annotations)):
        if pairs:
            lines += [f"{name}:", *(f"  {key}: {_quoted(value)}" for key, value in pairs.items())]
    return "      - " + "\n        ".join(lines) + "\n"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


# All metrics of the processes, as a table for docs/metrics.md. It imports what they import: engines, too.


MARK = "<!-- made by python -m pdmesh.monitoring -->\n"
CATALOGUE = {"Router": router_metrics.ALL, "Worker": worker_metrics.ALL, "Autoscaler": autoscaler_metrics.ALL}


def tables() -> str:
    """Return one table for each kind of process, in Markdown."""
    return "".join(f"\n### {title}\n\n{_table(instruments)}" for title, instruments in CATALOGUE.items())


def with_tables(page: str) -> str:
    """Return the page, with the current tables after its MARK."""
    return page.partition(MARK)[0] + MARK + tables()


def _table(instruments: Iterable[Instrument]) -> str:
    rows = [f"| `{_shown(each)}` | {each.kind.value} | {_labels(each)} | {each.help} |\n" for each in instruments]
    return "| name | kind | labels | |\n| --- | --- | --- | --- |\n" + "".join(rows)


def _shown(instrument: Instrument) -> str:
    return instrument.samples[0] if len(instrument.samples) == 1 else instrument.family


def _labels(instrument: Instrument) -> str:
    return ", ".join(f"`{label}`" for label in instrument.label_names)
