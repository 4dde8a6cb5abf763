"""The bill of materials of an image: every package of the environment, and written where the image is built."""

import json
import subprocess
import sys
from importlib import metadata
from pathlib import Path

from packaging.utils import canonicalize_name

from tests.k8s.dockerfile import ROOT, stages

SCRIPT = ROOT / "k8s/docker/sbom.py"


def test_every_package_of_an_environment_is_listed(tmp_path: Path) -> None:
    made = tmp_path / "sbom.json"
    subprocess.run([sys.executable, str(SCRIPT), str(made)], check=True, cwd=tmp_path, timeout=60)
    document = json.loads(made.read_text(encoding="utf-8"))
    assert (document["bomFormat"], document["specVersion"]) == ("CycloneDX", "1.5")
    listed = {each["name"]: each["version"] for each in document["components"]}
    installed = {str(canonicalize_name(each.metadata["Name"])): each.version for each in metadata.distributions()}
    installed.pop("pdmesh", None)
    assert listed == installed
    assert listed["grpcio"]
    assert len({each["bom-ref"] for each in document["components"]}) == len(listed)
    assert all(each["purl"].startswith(f"pkg:pypi/{each['name']}@") for each in document["components"])


def test_every_image_that_installs_the_project_writes_it_afterwards() -> None:
    lasts = [stage.of("RUN")[-1] for stage in stages().values() if any("--no-deps" in run for run in stage.of("RUN"))]
    assert len(lasts) == 5
    for last in lasts:
        assert last.endswith("--no-deps --no-build-isolation . && python k8s/docker/sbom.py")
