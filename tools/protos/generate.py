"""Generates the stubs from the files below `protos/`, or checks that the committed ones match.

`python -m tools.protos.generate` writes; `python -m tools.protos.generate --check` compares and exits 1 when they differ.
"""

import sys
import tempfile
from pathlib import Path

import grpc_tools
from grpc_tools import protoc

ROOT = Path(__file__).resolve().parents[2]
# Our own protocol, and three foreign ones (docs/gateway.md, docs/kserve.md, docs/vllm_engine.md).
PROTOS = ROOT / "protos"
FOLDERS = ("pdmesh/v1", "pdmesh/third_party/envoy", "pdmesh/third_party/kserve", "pdmesh/third_party/vllm")
WELL_KNOWN = Path(grpc_tools.__file__).parent / "_proto"  # google/protobuf/struct.proto and the like
SUFFIXES = ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py", "_pb2_grpc.pyi")


def generate(out: Path) -> list[Path]:
    """Write the stubs of every `.proto` file under `out`; return their paths relative to it."""
    sources = sorted(str(path.relative_to(PROTOS)) for folder in FOLDERS for path in (PROTOS / folder).glob("*.proto"))
    bin_folder = Path(sys.executable).parent
    plugins = [f"--plugin={name}={bin_folder / name}" for name in ("protoc-gen-mypy", "protoc-gen-mypy_grpc")]
    outputs = [f"--{kind}_out={option}{out}" for kind, option in OUTPUTS]
    status = protoc.main(["protoc", f"-I{PROTOS}", f"-I{WELL_KNOWN}", *plugins, *outputs, *sources])
    if status != 0:
        raise SystemExit(f"protoc failed with status {status}")
    return _stubs(out)


def _stubs(root: Path) -> list[Path]:
    """Return the stubs under `root`, relative to it."""
    paths = (path for folder in FOLDERS for path in (root / folder).iterdir())
    return sorted(path.relative_to(root) for path in paths if path.name.endswith(SUFFIXES))


OUTPUTS = (("python", ""), ("grpc_python", ""), ("mypy", "quiet:"), ("mypy_grpc", "quiet:"))


def stale(fresh: Path, names: list[Path]) -> list[str]:
    """Return the names of stubs that differ from the committed ones, are missing there, or have no `.proto` file any more."""
    committed = set(_stubs(ROOT))
    differing = {name for name in names if name not in committed or (ROOT / name).read_bytes() != (fresh / name).read_bytes()}
    return sorted(str(name) for name in differing | (committed - set(names)))


def main() -> None:
    """Generate in place, or with `--check` compare."""
    if "--check" not in sys.argv[1:]:
        generate(ROOT)
        return
    with tempfile.TemporaryDirectory() as folder:
        different = stale(Path(folder), generate(Path(folder)))
    if different:
        raise SystemExit("stale stubs, run `make stubs`: " + ", ".join(different))
    print("stubs are fresh")


if __name__ == "__main__":
    main()
