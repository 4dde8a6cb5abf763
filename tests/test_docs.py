"""Every link of the pages leads somewhere: files that are there, headings that exist, fields that say what they mean."""

from __future__ import annotations

import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs").rglob("*.md"))]
_FENCE = re.compile(r"^(```|~~~).*?^\1[^\n]*$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"!?\[(?:[^\[\]]|\[[^\[\]]*\])*\]\(([^()\s]+)\)")
_HEADING = re.compile(r"^#{1,6}\s+(.+?)\s*#*$", re.MULTILINE)
MAX_IMAGE_BYTES = 150_000


@cache
def text_of(page: Path) -> str:
    """Without blocks of code, whose brackets are no links."""
    return _FENCE.sub("", page.read_text(encoding="utf-8"))


@cache
def anchors(page: Path) -> frozenset[str]:
    """Of its headings, as a forge makes them: small letters, no punctuation, a number behind those that repeat."""
    found: dict[str, int] = {}
    names = []
    for heading in _HEADING.findall(text_of(page)):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        name = re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")
        names.append(f"{name}-{found[name]}" if name in found else name)
        found[name] = found.get(name, 0) + 1
    return frozenset(names)


def broken(page: Path) -> list[str]:
    """Relative links that lead nowhere."""
    return [link for link in _LINK.findall(text_of(page)) if "://" not in link and not _leads_somewhere(page, link)]


def _leads_somewhere(page: Path, link: str) -> bool:
    path, _, anchor = link.partition("#")
    target = (page.parent / path).resolve() if path else page
    if not target.exists():
        return False
    return not anchor or (target.suffix == ".md" and anchor in anchors(target))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_relative_link_leads_somewhere(page: Path) -> None:
    assert broken(page) == []


def named_in_the_threat_model() -> list[tuple[str, str]]:
    """Return file and name of every test in the last column of the table; each row has at least one."""
    rows = [line for line in (ROOT / "SECURITY.md").read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    model = [row.strip("| ").split(" | ") for row in rows if len(row.split(" | ")) == 4]
    found = []
    for row in model[2:]:
        named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", row[-1])
        assert named, f"no test in the row: {row}"
        found += named
    return found


def test_every_row_of_the_threat_model_names_tests_that_exist() -> None:
    named = named_in_the_threat_model()
    assert len(named) > 20
    lacking = [f"{file}::{name}" for file, name in named if not re.search(rf"def {name}\(", _source(file))]
    assert not lacking


@cache
def _source(file: str) -> str:
    return (ROOT / file).read_text(encoding="utf-8")


def test_a_link_that_leads_nowhere_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# A `b`.c\n[a](#a-bc) [b](#nowhere) ![c](none.png) [d](https://x/y)\n```\n[e](none.md)\n```\n", encoding="utf-8"
    )
    assert anchors(page) == {"a-bc"}
    assert broken(page) == ["#nowhere", "none.png"]


def test_every_page_and_image_is_reached_from_the_readme() -> None:
    reached, ahead = set(), [ROOT / "README.md"]
    while ahead:
        page = ahead.pop()
        reached.add(page)
        links = _LINK.findall(text_of(page)) if page.suffix == ".md" else []
        targets = {(page.parent / link.partition("#")[0]).resolve() for link in links if "://" not in link and link[0] != "#"}
        ahead += sorted(target for target in targets - reached if target.is_file())
    images = set((ROOT / "docs/images").iterdir())
    assert set(PAGES) | images <= reached
    assert {image.name: image.stat().st_size for image in images if image.stat().st_size > MAX_IMAGE_BYTES} == {}


def test_tables_have_as_many_cells_as_their_head() -> None:
    for page in PAGES:
        for table in re.findall(r"(?:^\|.*\n)+", text_of(page), re.MULTILINE):
            widths = {len(re.split(r"(?<!\\)\|", line)) for line in table.splitlines()}
            assert len(widths) == 1, f"{page.name}: {table.splitlines()[0]}"


def test_blocks_of_python_compile() -> None:
    for page in PAGES:
        for block in re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL):
            compile(block, page.name, "exec")


def test_flags_of_the_load_test_exist() -> None:
    sections = (ROOT / "docs/loadtest.md").read_text(encoding="utf-8").split("\n## ")
    page = "".join(section for section in sections if not section.startswith("Third-party load generators"))
    command = [sys.executable, "-m", "pdmesh", "loadtest"]
    helps = [[*command, "--help"], [*command, "compare", "--help"], [*command, "report", "--help"]]
    known = "".join(subprocess.run(each, cwd=ROOT, capture_output=True, text=True, check=True).stdout for each in helps)
    assert {flag for flag in re.findall(r"(?<!ARGS=)--[a-z][a-z-]+", page) if flag not in known} == set()
