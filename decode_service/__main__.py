"""Run a worker with the role `decode`: `python -m decode_service`."""

from pdmesh.worker.main import decode_main

if __name__ == "__main__":
    decode_main()
