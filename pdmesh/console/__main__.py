"""Run `python -m pdmesh.console`."""

from pdmesh.console.main import main

if __name__ == "__main__":
    main()
