"""For all tests."""

import os

from hypothesis import settings

# The same examples in every run: who changes one thing is not to meet a failure of another by chance. `PDMESH_EXPLORE=1` looks
# for new ones.
settings.register_profile("same", derandomize=True)
if not os.environ.get("PDMESH_EXPLORE"):
    settings.load_profile("same")
