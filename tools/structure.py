"""Writes the table of packages in docs/structure.md from their docstrings.

`python -m tools.structure` writes it; with `--check` it compares and exits 1 when the page is stale.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/structure.md"
BEGIN, END = "<!-- packages: made by python -m tools.structure -->\n", "<!-- end of packages -->\n"
PACKAGES = ("router", "prefill_service", "decode_service", "kvtransfer", "pdmesh", "pdmesh_vllm", "tools")


def table() -> str:
    """Return one line for each package: its folder, its modules, the first sentence of its docstring."""
    lines = ["| folder | what it owns | modules |", "| --- | --- | --- |"]
    for package in PACKAGES:
        for init in sorted((ROOT / package).rglob("__init__.py")):
            folder = init.parent.relative_to(ROOT)
            lines.append(f"| `{folder}/` | {_summary(init)} | {', '.join(f'`{name}`' for name in _modules(init.parent))} |")
    return "\n".join(lines) + "\n"


def _summary(init: Path) -> str:
    docstring = ast.get_docstring(ast.parse(init.read_text(encoding="utf-8"))) or ""
    return " ".join(docstring.split("\n\n")[0].split()).replace("|", "\\|")


def _modules(folder: Path) -> Iterator[str]:
    for path in sorted(folder.glob("*.py")):
        if not path.name.startswith("__") and "_pb2" not in path.name:
            yield path.stem


def page(text: str) -> str:
    """Return the page with its table made anew."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}{table()}{END}{after}"


def main() -> None:
    """Write the table, or with `--check` compare it."""
    text = PAGE.read_text(encoding="utf-8")
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(page(text), encoding="utf-8")
    elif page(text) != text:
        raise SystemExit("docs/structure.md is stale, run `make stubs`")
    else:
        print("the table of packages is fresh")


if __name__ == "__main__":
    main()
