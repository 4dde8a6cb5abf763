"""Writes k8s/components/telemetry/: `python -m pdmesh.monitoring [--check] [--folder F]`; --files F writes plain files instead,
for a Prometheus and a Grafana that are not on Kubernetes."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path

from pdmesh.monitoring.dashboards_fleet import all_dashboards
from pdmesh.monitoring.manifests import dashboards_manifest, rules_file, rules_manifest
from pdmesh.monitoring.rules import groups

FOLDER = Path(__file__).resolve().parents[2] / "k8s" / "components" / "telemetry"


def manifests() -> Mapping[str, str]:
    """By name of the file."""
    return {"rules.yaml": rules_manifest(groups()), "dashboards.yaml": dashboards_manifest(all_dashboards())}


def plain_files() -> Mapping[str, str]:
    """The same without Kubernetes."""
    return {"pdmesh.rules.yaml": rules_file(groups()), **{f"{each.name}.json": each.to_json() for each in all_dashboards()}}


def main() -> int:
    """0: written, or as it should be; 1: --check found a difference."""
    parser = argparse.ArgumentParser(prog="python -m pdmesh.monitoring", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if something differs")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where the manifests are")
    parser.add_argument("--files", type=Path, help="write rules and dashboards here, not as manifests")
    options = parser.parse_args()
    folder, files = (options.folder, manifests()) if options.files is None else (options.files, plain_files())
    if options.check:
        stale = [name for name, text in files.items() if not _is_text(folder / name, text)]
        print("".join(f"{folder / name} is stale: run python -m pdmesh.monitoring\n" for name in stale), end="", file=sys.stderr)
        return int(bool(stale))
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    return 0


def _is_text(path: Path, text: str) -> bool:
    return path.exists() and path.read_text(encoding="utf-8") == text


if __name__ == "__main__":
    sys.exit(main())
