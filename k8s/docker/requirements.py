"""Prints the requirements of pdmesh with some of its extras, one a line: an image has the packages in a layer below the code.

python k8s/docker/requirements.py services,loadtest
python k8s/docker/requirements.py --missing     # the pins of requirements.lock for packages that this Python lacks
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Collection
from importlib import metadata
from pathlib import Path

_OWN_EXTRAS = re.compile(r"pdmesh\[([a-z, ]+)\]")


def requirements(pyproject: str, extras: list[str]) -> list[str]:
    """Return the project's own requirements and those of `extras`, in order, each once; `pyproject` is TOML. Raises KeyError for
    an unknown extra."""
    project = tomllib.loads(pyproject)["project"]
    found: list[str] = list(project["dependencies"])
    for extra in extras:
        for requirement in project["optional-dependencies"][extra]:
            own = _OWN_EXTRAS.fullmatch(requirement)
            found += requirements(pyproject, own[1].replace(" ", "").split(",")) if own else [requirement]
    return list(dict.fromkeys(found))


def missing(lock: str, installed: Collection[str]) -> list[str]:
    """Return the pins of a lock file whose packages are not among the installed names. A package that is installed stays as it
    is: another one pins it."""
    there = {_canonical(name) for name in installed}
    pins = [line for line in lock.splitlines() if "==" in line and not line.startswith("#")]
    return [pin for pin in pins if _canonical(pin.partition("==")[0]) not in there]


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _output(argument: str) -> list[str]:
    if argument == "--missing":
        installed = [each.metadata["Name"] for each in metadata.distributions()]
        return missing(Path("requirements.lock").read_text(encoding="utf-8"), installed)
    return requirements(Path("pyproject.toml").read_text(encoding="utf-8"), argument.split(","))


if __name__ == "__main__":
    print("\n".join(_output(sys.argv[1])))
