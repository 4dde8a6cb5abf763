"""Run `python -m pdmesh`."""

from pdmesh.cli import main

if __name__ == "__main__":
    main()
