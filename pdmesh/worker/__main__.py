"""Run a worker: `python -m pdmesh.worker`."""

from pdmesh.worker.main import main

if __name__ == "__main__":
    main()
