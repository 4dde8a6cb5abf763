"""Run a worker with the role `prefill`: `python -m prefill_service`."""

from pdmesh.worker.main import prefill_main

if __name__ == "__main__":
    prefill_main()
