"""The checks, each a dictionary with what was looked at and the `problems` that were found."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from tests.k8s.charts import SAME, in_namespace, templated
from tests.k8s.kustomize import FOLDER, parsed, render
from tests.k8s.meshes import EXAMPLES, MESHES

KUBERNETES_VALIDATE, CHECKOV = "kubernetes-validate==1.37.0", "checkov==3.3.30"
# Of operators that bring their schemas with them: Kubernetes' own know nothing of them.
OTHERS = {"ServiceMonitor", "ScaledObject", "InferencePool"}
TIMEOUT_S = 600.0
Found = dict[str, Any]


def rendered(folder: Path) -> list[Path]:
    """A file for each folder that people apply, and for each example of the chart, with what it alone makes: Secrets, tests."""
    made = []
    for name in sorted({each for folders in (*MESHES.values(), EXAMPLES) for each in folders}):
        path = folder / f"{name.replace('/', '_')}.yaml"
        path.write_text(yaml.safe_dump_all(render(FOLDER / name)))
        made.append(path)
    for examples in sorted({*SAME.values(), ("green",)}):
        path = folder / f"chart{''.join(f'_{name}' for name in examples)}.yaml"
        path.write_text(yaml.safe_dump_all(in_namespace(parsed(templated(*examples)))))
        made.append(path)
    return made


def validate(cache: Path, version: str, files: Sequence[Path]) -> Found:
    """Against the schemas of a version of Kubernetes; a field that is not known is a problem."""
    program = _installed(cache, KUBERNETES_VALIDATE) / "kubernetes-validate"
    problems, skipped, num = [], 0, 0
    for path in files:
        printed = _run([str(program), "--strict", "--kubernetes-version", version, str(path)])
        for line in filter(None, printed.splitlines()):
            is_other = any(f"Couldn't find schema for kind {kind} " in line for kind in OTHERS)
            skipped, num = skipped + is_other, num + line.startswith("INFO")
            problems += [] if is_other or line.startswith("INFO") else [line.replace(str(path), path.name)]
    if num == 0:
        problems.append("nothing was validated")
    return {"check": KUBERNETES_VALIDATE, "kubernetes": version, "objects": num, "no_schema": skipped, "problems": problems}


def lint(cache: Path, folder: Path) -> Found:
    """What is skipped stands in the manifests, with its reason (annotations checkov.io/skip…)."""
    program = _installed(cache, CHECKOV) / "checkov"
    printed = _run([str(program), "--directory", str(folder), "--framework", "kubernetes", "--skip-download", "--output", "json"])
    found = json.loads(printed)["results"]
    failed = [f"{each['check_id']} {each['check_name']}: {each['resource']}" for each in found["failed_checks"]]
    if not found["passed_checks"]:
        failed.append("nothing was linted")
    numbers = {"passed": len(found["passed_checks"]), "skipped": len(found["skipped_checks"])}
    return {"check": CHECKOV, **numbers, "problems": sorted(set(failed))}


def _installed(cache: Path, pinned: str) -> Path:
    """The programs' folder of an environment that holds the package, made if it is not there. Raises CalledProcessError."""
    environment = cache / pinned.replace("==", "-")
    if not (environment / ".made").exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(environment)], check=True)
        command = [str(environment / "bin/python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", pinned]
        subprocess.run(command, check=True, timeout=TIMEOUT_S)
        (environment / ".made").touch()
    return environment / "bin"


def _run(command: Sequence[str]) -> str:
    """What it prints on stdout; its exit code says what its findings say."""
    return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False).stdout
