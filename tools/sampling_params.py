"""What follows from the description of the sampling parameters (pdmesh/sampling_params.py) where Python cannot read it.

`python -m tools.sampling_params` writes the record of the C++ sampler, and the lists of parameters in the documents on protocols;
with `--check` it compares and exits 1 when one of them is stale.
"""

from __future__ import annotations

import sys
from pathlib import Path

from pdmesh.sampling_params import DRAWN, PARAMETERS, Kind, Parameter

ROOT = Path(__file__).parents[1]
HEADER = "pdmesh/engine/kernels/cpu/sampling_params.h"
BEGIN, END = "<!-- made by make stubs -->", "<!-- end -->"
# They have rows of their own.
OF_OPENAI = ("temperature", "top_p", "presence_penalty", "frequency_penalty", "seed", "max_tokens", "logit_bias", "logprobs", "n")


def header() -> str:
    """All fields have eight bytes: nothing is padded."""
    lines = [f"    {_type(parameter)} {parameter.name};" for parameter in DRAWN]
    return "\n".join(
        [
            "// Made from pdmesh/sampling_params.py by `make stubs`; what the fields mean stands there.",
            "#pragma once",
            "",
            "#include <cstdint>",
            "",
            "// What a request asks of the sampler. Numbers are double, as in Python: rules round them where torch does.",
            "struct PdmeshSamplingParams {",
            *lines,
            "};",
            "",
        ]
    )


def _type(parameter: Parameter) -> str:
    if parameter.kind is Kind.NUMBER:
        return "double"
    return "uint64_t" if parameter.rules.bits == 64 else "int64_t"


def documents() -> dict[str, str]:
    """Path and list, which stands there between BEGIN and END."""
    names = [parameter.name for parameter in PARAMETERS]
    return {
        "docs/openai.md": _listed([name for name in names if name not in OF_OPENAI]),
        "docs/kserve.md": _listed(names),
    }


def _listed(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def files() -> dict[Path, str]:
    """What has to stand in each file. Raises ValueError for a document without the marks."""
    made = {ROOT / HEADER: header()}
    for name, listed in documents().items():
        before, begin, rest = (ROOT / name).read_text(encoding="utf-8").partition(BEGIN)
        _, end, after = rest.partition(END)
        if not begin or not end:
            raise ValueError(f"{name}: {BEGIN} or {END} is missing")
        made[ROOT / name] = f"{before}{BEGIN}{listed}{END}{after}"
    return made


def main() -> None:
    """Write the files, or with `--check` only compare."""
    stale = {path: text for path, text in files().items() if not path.exists() or path.read_text(encoding="utf-8") != text}
    if "--check" not in sys.argv[1:]:
        for path, text in stale.items():
            path.write_text(text, encoding="utf-8")
    elif stale:
        names = ", ".join(path.relative_to(ROOT).as_posix() for path in stale)
        raise SystemExit(f"{names}: the description of the sampling parameters is another: run `make stubs`")
    else:
        print("what follows from the sampling parameters is fresh")


if __name__ == "__main__":
    main()
