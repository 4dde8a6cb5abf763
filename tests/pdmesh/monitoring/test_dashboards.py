"""The files that Grafana loads, and that what stands in k8s/ is what the code makes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml  # type: ignore[import-untyped]

from pdmesh.autoscaler import metrics as autoscaler_metrics
from pdmesh.monitoring import rules
from pdmesh.monitoring.__main__ import main, manifests, own_files, plain_files
from pdmesh.monitoring.dashboards import all_dashboards
from pdmesh.monitoring.manifests import CATALOGUE
from pdmesh.monitoring.panels import COLUMNS, Dashboard
from pdmesh.runtime.telemetry.metrics import Instrument
from pdmesh.worker import metrics as worker_metrics
from router.telemetry import metrics as router_metrics

ALL = [instrument for instruments in CATALOGUE.values() for instrument in instruments]
DASHBOARDS = all_dashboards()
_OF_THE_PROCESS = {"process_cpu_seconds_total", "process_resident_memory_bytes", "up"}
_NAMES = re.compile(r"\b(?:pdmesh|gen_ai|process)[_:][a-zA-Z0-9_:]+(?=\s*[{\[\)(\s*/]|$)")


def test_what_stands_in_the_folder_is_what_the_code_makes() -> None:
    for path, text in own_files().items():
        assert path.read_text(encoding="utf-8") == text, f"{path.name}: run python -m pdmesh.monitoring"


def test_names_of_the_catalogue_are_told_apart() -> None:
    """Those of the readers of OTLP, and those of Prometheus."""
    assert len({each.name for each in ALL}) == len({each.family for each in ALL}) == len(ALL)
    for each in ALL:
        assert list(each.buckets) == sorted(set(each.buckets)) and each.help[0].isupper() | each.help[0].isdigit()


def test_every_metric_of_a_process_is_in_the_catalogue() -> None:
    """From which the pages of metrics are made, and by which queries are checked."""
    made = {
        value.name
        for module in (router_metrics, worker_metrics, autoscaler_metrics)
        for value in vars(module).values()
        if isinstance(value, Instrument)
    }
    assert made == {each.name for each in ALL}


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda each: each.name)
def test_a_dashboard_is_whole(dashboard: Dashboard) -> None:
    made = json.loads(dashboard.to_json())
    panels = made["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert [panel["title"] for panel in panels if panel["type"] != "row"] == [panel.title for panel in dashboard.panels]
    assert all(panel["targets"] for panel in panels if panel["type"] != "row")
    cells = [(x, y) for panel in panels for x, y in _cells(panel["gridPos"])]
    assert len(set(cells)) == len(cells) and all(0 <= x < COLUMNS for x, _ in cells), "panels do not lie on each other"
    variables = {variable["name"] for variable in made["templating"]["list"]} | {"__rate_interval"}
    used = {name for panel in dashboard.panels for query in panel.queries for name in re.findall(r"\$(\w+)", query.expr)}
    assert used <= variables


def _known() -> set[str]:
    """Samples, records, and labels, which look alike."""
    samples = {name for each in ALL for name in (*each.samples, *each.label_names)}
    return samples | _OF_THE_PROCESS | {rule.record for group in rules.groups() for rule in group.rules}


def _cells(at: dict[str, int]) -> list[tuple[int, int]]:
    return [(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])]


def test_workers_show_where_kv_comes_from_and_what_tiers_hold() -> None:
    queries = {panel.title: [query.expr for query in panel.queries] for each in DASHBOARDS for panel in each.panels}
    sources, sizes = queries["Prompt tokens by source"], queries["KV in tiers"]
    for exprs, metrics in (
        (sources, ["pdmesh_kv_restored_tokens_total", "pdmesh_kv_pulled_tokens_total", "pdmesh_engine_tokens_total"]),
        (sizes, ["pdmesh_kv_tier_size_bytes", "pdmesh_kv_tier_capacity_bytes"]),
    ):
        assert len(exprs) == len(metrics) and all(metric in expr for metric, expr in zip(metrics, exprs, strict=True))


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda each: each.name)
def test_a_dashboard_asks_for_what_there_is(dashboard: Dashboard) -> None:
    asked = {name for panel in dashboard.panels for query in panel.queries for name in _NAMES.findall(query.expr)}
    assert asked and asked <= _known()
    assert {variable.metric for variable in dashboard.variables} <= _known()


def test_rules_ask_for_what_there_is() -> None:
    assert {name for group in rules.groups() for rule in group.rules for name in _NAMES.findall(rule.expr)} <= _known()


def test_manifests_hold_the_plain_files() -> None:
    """As YAML reads them."""
    held = {
        name: text
        for manifest in manifests().values()
        for document in yaml.safe_load_all(manifest)
        for name, text in document["data"].items()
    }
    assert held.items() >= {name: text for name, text in plain_files().items() if name.endswith(".yaml")}.items()
    for dashboard in DASHBOARDS:
        assert json.loads(held[f"{dashboard.name}.json"]) == json.loads(dashboard.to_json())


def test_plain_files_are_written_and_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["monitoring", "--files", str(tmp_path)])
    assert main() == 0 and (tmp_path / "pdmesh.rules.yaml").exists()
    monkeypatch.setattr("sys.argv", ["monitoring", "--files", str(tmp_path), "--check"])
    assert main() == 0
    (tmp_path / "pdmesh.rules.yaml").write_text("groups: []")
    assert main() == 1
