"""Writes k8s/components/telemetry/ and the tables of docs/metrics.md: `python -m pdmesh.monitoring [--check]`.

--files F writes plain files instead, for a Prometheus and a Grafana that are not on Kubernetes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path

from pdmesh.monitoring.dashboards import all_dashboards
from pdmesh.monitoring.manifests import dashboards_manifest, rules_file, rules_manifest, with_tables
from pdmesh.monitoring.rules import groups

ROOT = Path(__file__).resolve().parents[2]
FOLDER, PAGE = ROOT / "k8s" / "components" / "telemetry", ROOT / "docs" / "metrics.md"


def manifests() -> Mapping[str, str]:
    """Return the manifests by name of the file."""
    return {"rules.yaml": rules_manifest(groups()), "dashboards.yaml": dashboards_manifest(all_dashboards())}


def own_files() -> Mapping[Path, str]:
    """Return the files of this repository."""
    page = with_tables(PAGE.read_text(encoding="utf-8"))
    return {PAGE: page, **{FOLDER / name: text for name, text in manifests().items()}}


def plain_files() -> Mapping[str, str]:
    """Return the same without Kubernetes."""
    return {"pdmesh.rules.yaml": rules_file(groups()), **{f"{each.name}.json": each.to_json() for each in all_dashboards()}}


def main() -> int:
    """Run the command; return 0: written, or up to date; 1: --check found a difference."""
    parser = argparse.ArgumentParser(prog="python -m pdmesh.monitoring", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if something differs")
    parser.add_argument("--files", type=Path, help="write rules and dashboards into this folder instead, not as manifests")
    options = parser.parse_args()
    folder = options.files
    files = own_files() if folder is None else {folder / name: text for name, text in plain_files().items()}
    if options.check:
        stale = [path for path, text in files.items() if not _is_text(path, text)]
        print("".join(f"{path} is stale: run python -m pdmesh.monitoring\n" for path in stale), end="", file=sys.stderr)
        return int(bool(stale))
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return 0


def _is_text(path: Path, text: str) -> bool:
    return path.exists() and path.read_text(encoding="utf-8") == text


if __name__ == "__main__":
    sys.exit(main())
