"""The rules through Prometheus' own promtool: they are read, and alerts fire when and only when they should."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import yaml  # type: ignore[import-untyped]

from pdmesh.monitoring import rules
from pdmesh.monitoring.__main__ import FOLDER
from pdmesh.monitoring.manifests import rules_file

PROMTOOL = shutil.which("promtool")
needs_promtool = pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed (Debian's package prometheus)")
CASES = Path(__file__).with_name("rules_test.yaml")


def _promtool(folder: Path, *arguments: str) -> str:
    assert PROMTOOL is not None
    (folder / "pdmesh.rules.yaml").write_text(rules_file(rules.groups()))
    (folder / CASES.name).write_text(CASES.read_text())
    done = subprocess.run([PROMTOOL, *arguments], cwd=folder, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@needs_promtool
def test_promtool_reads_all_of_them(tmp_path: Path) -> None:
    num_rules = sum(len(group.rules) for group in rules.groups())
    assert f"{num_rules} rules found" in _promtool(tmp_path, "check", "rules", "pdmesh.rules.yaml")


@needs_promtool
def test_alerts_fire_when_they_should(tmp_path: Path) -> None:
    _promtool(tmp_path, "test", "rules", CASES.name)


def test_every_alert_says_what_it_is_and_how_urgent() -> None:
    alerts = [rule for group in rules.groups() for rule in group.rules if rule.alert]
    assert len({rule.alert for rule in alerts}) == len(alerts)
    for rule in alerts:
        assert rule.labels["severity"] in ("page", "ticket") and set(rule.annotations) == {"summary", "description"}


def test_every_alert_has_a_case() -> None:
    text = CASES.read_text()
    alerts = [rule.alert for group in rules.groups() for rule in group.rules if rule.alert]
    assert [name for name in alerts if f"alertname: {name}\n" not in text] == []


@needs_promtool
def test_promtool_reads_the_scrape_configuration(tmp_path: Path) -> None:
    """But what finds pods: Debian's Prometheus is made without it."""
    (manifest,) = yaml.safe_load_all((FOLDER / "scrape.yaml").read_text(encoding="utf-8"))
    configuration = yaml.safe_load(manifest["data"]["pdmesh.scrape.yaml"])
    (job,) = configuration["scrape_configs"]
    job["static_configs"] = [{"targets": [job.pop("kubernetes_sd_configs")[0]["role"]]}]
    (tmp_path / "prometheus.yaml").write_text(yaml.safe_dump(configuration))
    _promtool(tmp_path, "check", "config", "--syntax-only", "prometheus.yaml")
