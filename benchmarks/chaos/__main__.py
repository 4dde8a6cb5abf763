"""`python -m benchmarks.chaos`."""

import sys

from benchmarks.chaos.run import main

if __name__ == "__main__":
    sys.exit(main())
