"""Prints the requirements of pdmesh with some of its extras, one a line: an image has the packages in a layer below the code.

python k8s/docker/requirements.py services,loadtest
"""

from __future__ import annotations

import re
import sys
import tomllib
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


if __name__ == "__main__":
    print("\n".join(requirements(Path("pyproject.toml").read_text(encoding="utf-8"), sys.argv[1].split(","))))
