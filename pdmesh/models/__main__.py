"""Run `python -m pdmesh.models fetch NAME` or `python -m pdmesh.models list`."""

from pdmesh.models.registry import main

if __name__ == "__main__":
    raise SystemExit(main())
