"""Every file and folder that docs/structure.md names exists."""

import re

from tests.structure.measure import ROOT

PAGE = ROOT / "docs/structure.md"
_CODE = re.compile(r"`([^`\n]+)`")
_TOPS = "clients|pdmesh|router|kvtransfer|decode_service|prefill_service|protos|tests|tools|benchmarks|k8s|examples"
_PATH = re.compile(rf"^({_TOPS})/[\w./-]*$")


def named(text: str) -> list[str]:
    """Return the paths of the page; `NAME` in a recipe's path is of a file that does not exist yet."""
    return [name for name in _CODE.findall(text) if _PATH.match(name) and "NAME" not in name]


def test_what_the_page_names_exists() -> None:
    paths = named(PAGE.read_text(encoding="utf-8"))
    assert len(paths) > 100
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_short_names_stand_beside_the_path_before_them() -> None:
    """`gemm.h` behind `pdmesh/engine/kernels/cpu/step.cpp` is in the same folder."""
    wrong = []
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        folder = None
        for name in _CODE.findall(line):
            if _PATH.match(name):
                folder = (ROOT / name).parent if "." in name.rsplit("/", 1)[-1] else ROOT / name
            elif folder is not None and re.fullmatch(r"[\w]+\.(py|h|cpp)", name) and not (folder / name).exists():
                wrong.append((line[:60], name))
    assert wrong == []
