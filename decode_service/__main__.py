"""Run a worker with the role `decode`: `python -m decode_service`."""

from pdmesh.runtime.process import start

if __name__ == "__main__":
    start("decode_service")
