"""`python -m decode_service`: a worker with one role."""

from pdmesh.worker.main import decode_main

if __name__ == "__main__":
    decode_main()
