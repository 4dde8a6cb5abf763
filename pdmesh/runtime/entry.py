"""Programs that other packages start without importing them.

`python -m prefill_service` is a worker with one role, and the worker is made of `prefill_service`. It is found by its name when
the program starts, so that imports point one way.
"""

import pkgutil

PROGRAMS = {
    "prefill_service": "pdmesh.worker.main:prefill_main",
    "decode_service": "pdmesh.worker.main:decode_main",
}


def start(program: str) -> None:
    """Run a program until it ends. Raises KeyError for one that is not listed."""
    pkgutil.resolve_name(PROGRAMS[program])()
