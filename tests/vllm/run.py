"""`make test-vllm`: the contract of engines, and what only vLLM has, under the Python that has vLLM; what passed is written to
`benchmarks/results/vllm_contract.json`.

    python -m tests.vllm.run .venv-vllm/bin/python
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

from benchmarks.harness import Figure, write

TESTS = ("tests/worker/engines", "tests/vllm")
HAS_RUN = (0, 1)
"""Exit codes of pytest after which every test has run: all passed, or some failed."""


def main(python: str) -> int:
    """Return pytest's exit code."""
    with tempfile.TemporaryDirectory(prefix="pdmesh-test-vllm-") as folder:
        report = Path(folder) / "report.xml"
        code = subprocess.run([python, "-m", "pytest", *TESTS, f"--junitxml={report}"], check=False).returncode
        if code in HAS_RUN:
            write("vllm_contract", figures(outcomes(report)))
    return code


def outcomes(report: Path) -> dict[str, Counter[str]]:
    """Return how many tests passed, failed and were skipped, by the engine that a test's parameter names; "" without one."""
    found: dict[str, Counter[str]] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        name = case.get("name", "")
        engine = next((each for each in ("vllm-two-ranks", "vllm", "pdmesh") if f"[{each}" in name), "")
        said = {child.tag for child in case}
        outcome = "skipped" if "skipped" in said else "failed" if said & {"failure", "error"} else "passed"
        found.setdefault(engine, Counter())[outcome] += 1
    return found


def figures(found: dict[str, Counter[str]]) -> list[Figure]:
    """Return them by engine. Pure."""
    names = {"": "tests of vLLM's own", "pdmesh": "contract on pdmesh", "vllm": "contract on vLLM"}
    listed = []
    for engine, counts in sorted(found.items()):
        name = names.get(engine, "contract on vLLM in two ranks")
        listed.append(Figure(f"{name}: passed", counts["passed"], "tests", "higher"))
        listed.append(Figure(f"{name}: failed", counts["failed"], "tests", "lower", goal=0))
        listed.append(Figure(f"{name}: skipped", counts["skipped"], "tests", "lower"))
    return listed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
