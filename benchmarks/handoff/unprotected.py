"""A worker whose KV carries no checksum: `python -m benchmarks.handoff.unprotected [flags of a worker]`.

It says the same as all others about itself and takes their place in a mesh of its own kind; `cost.py` compares the two.
"""

from benchmarks.handoff.ends import set_sums
from pdmesh.worker.main import main

if __name__ == "__main__":
    if not set_sums(sums=False):
        raise SystemExit("without the native library the checksum is part of the way and cannot be left out")
    main()
