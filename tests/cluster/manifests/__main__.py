"""`python -m tests.cluster.manifests`."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

from tests.cluster.manifests.checks import lint, rendered, validate

VERSIONS = ("1.34", "1.37")
"""Of Kubernetes."""


def main() -> int:
    """Exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.cluster.manifests", description="Validates and lints the manifests.")
    parser.add_argument("--cache", type=Path, required=True, help="where the tools' environments are kept")
    cache = parser.parse_args().cache.resolve()
    with tempfile.TemporaryDirectory() as folder:
        files = rendered(Path(folder))
        found = [validate(cache, version, files) for version in VERSIONS]
        found.append(lint(cache, Path(folder)))
    for each in found:
        print(json.dumps(each), flush=True)
    return 1 if any(each["problems"] for each in found) else 0


if __name__ == "__main__":
    sys.exit(main())
