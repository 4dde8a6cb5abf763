"""Writes what this Python's environment holds as a bill of materials, CycloneDX 1.5 in JSON: each image has one of itself.

python k8s/docker/sbom.py            # to sbom.cdx.json in the environment's folder
python k8s/docker/sbom.py FILE
"""

from __future__ import annotations

import json
import re
import sys
from importlib import metadata
from pathlib import Path
from urllib.parse import quote

PROJECT = "pdmesh"
FILE = "sbom.cdx.json"


def bill_of_materials() -> dict[str, object]:
    """Return the document: the project as what it is about, and all other packages, by name."""
    packages = {_canonical(each.metadata["Name"]): each.version for each in metadata.distributions()}
    project = packages.pop(PROJECT, "")
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {"component": {"type": "application", "name": PROJECT, "version": project}},
        "components": [_component(name, version) for name, version in sorted(packages.items())],
    }


def _component(name: str, version: str) -> dict[str, str]:
    purl = f"pkg:pypi/{name}@{quote(version, safe='')}"
    return {"type": "library", "name": name, "version": version, "purl": purl, "bom-ref": purl}


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


if __name__ == "__main__":
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(sys.prefix) / FILE
    path.write_text(json.dumps(bill_of_materials(), indent=1) + "\n", encoding="utf-8")
