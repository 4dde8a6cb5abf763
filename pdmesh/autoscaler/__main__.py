"""Run `python -m pdmesh.autoscaler`."""

from pdmesh.autoscaler.main import main

if __name__ == "__main__":
    main()
