"""Run `python -m pdmesh`, without modules of the current folder.

`python -m` puts that folder first, and people have a `router` or a `rich.py` of their own in it. It stays only where this package
itself comes from it: a checkout that is not installed.
"""

import os
import sys

_HOME = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
if __name__ == "__main__" and not sys.flags.safe_path and sys.path[0] == os.getcwd() != _HOME:
    del sys.path[0]

from pdmesh.cli import main  # noqa: E402  the folder is gone by now

if __name__ == "__main__":
    main()
