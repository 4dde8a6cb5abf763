"""`python -m tests.cluster.images`."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from tests.cluster.images import chroots
from tests.cluster.images.build import Builder
from tests.cluster.images.programs import HELPS, seen, together


def main() -> int:
    """Exit code 1 where a program of an image does not do what it should."""
    parser = argparse.ArgumentParser(prog="python -m tests.cluster.images", description="Builds images in plain folders.")
    parser.add_argument("targets", nargs="*", default=list(HELPS), metavar="TARGET", help=f"of {', '.join(HELPS)}")
    parser.add_argument("--cache", type=Path, required=True, help="where layers are kept")
    parser.add_argument("--bind", type=Path, action="append", default=[], help="folder of this machine that pip needs")
    parser.add_argument("--torch-index", default="", help="as the build argument TORCH_INDEX")
    parser.add_argument("--model", type=Path, help="a model's folder: the programs are started with it and asked something")
    options = parser.parse_args()
    chroots.enter()
    builder = Builder(options.cache.resolve(), options.bind, {"TORCH_INDEX": options.torch_index})
    is_well = True
    for target in options.targets:
        layer = builder.build(target)
        found = seen(target, layer)
        is_well = is_well and all(found.values())
        print(json.dumps({"image": target, "mib": round(builder.size(target) / 2**20, 1), **found}), flush=True)
    if options.model is not None:
        print(json.dumps({"mesh": together(builder, options.model.resolve())}), flush=True)
    return 0 if is_well else 1


if __name__ == "__main__":
    sys.exit(main())
