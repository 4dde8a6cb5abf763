"""Run a worker with the role `prefill`: `python -m prefill_service`."""

from pdmesh.runtime.process import start

if __name__ == "__main__":
    start("prefill_service")
