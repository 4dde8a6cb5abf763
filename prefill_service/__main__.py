"""`python -m prefill_service`: a worker with one role."""

from pdmesh.worker.main import prefill_main

if __name__ == "__main__":
    prefill_main()
