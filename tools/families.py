"""Writes the tables of docs/models.md: the families with their parts, and the parts with the backends that compute them.

`python -m tools.families` writes them; with `--check` it compares and exits 1 when the page is stale. Configs are those of the
tiny checkpoints that tests compare with transformers (tests/support/tiny_families.py).
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from pdmesh.engine.kernels.cpu.model import PARTS as NATIVE
from pdmesh.engine.kernels.triton.support import PARTS as TRITON
from pdmesh.engine.models.config import ModelConfig
from pdmesh.engine.models.registry import FAMILIES, model_config
from tests.support.tiny_families import VARIANTS, tiny_config

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/models.md"
KERNELS = {"CPU kernels": NATIVE, "Triton": TRITON}
_INTERNLM3 = {
    "model_type": "internlm3", "vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 2048, "qkv_bias": True,
}  # fmt: skip
"""transformers has no class of it."""


def configs_of(model_type: str) -> list[ModelConfig]:
    """Return the configs of a family's variants."""
    variants = [variant for variant, (kind, _) in VARIANTS.items() if kind == model_type]
    contents = [tiny_config(variant).to_dict() for variant in variants] or [_INTERNLM3]
    return [model_config(content) for content in contents]


def parts_of(configs: Iterable[ModelConfig]) -> tuple[list[str], list[str]]:
    """Return the parts that all of these have, and those that some have."""
    each = [config.parts for config in configs]
    names = list(dict.fromkeys(part for parts in each for part in parts))
    common = [name for name in names if all(name in parts for parts in each)]
    return common, [name for name in names if name not in common]


def family_table(families: Mapping[str, list[ModelConfig]]) -> str:
    """Return a line for each family."""
    lines = [
        "| `model_type` | file | parts beyond a Llama's | some checkpoints also | kernels |",
        "| --- | --- | --- | --- | --- |",
    ]
    for model_type, configs in families.items():
        common, some = parts_of(configs)
        kernels = [name for name, computed in KERNELS.items() if computed.issuperset(common)]
        cells = (f"`{_file(model_type)}`", ", ".join(common), ", ".join(some), ", ".join(kernels))
        lines.append(f"| `{model_type}` | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _file(model_type: str) -> str:
    path = Path(sys.modules[FAMILIES[model_type].read.__module__].__file__ or "")
    return str(path.relative_to(ROOT / "pdmesh/engine/models/families"))


def part_table(families: Mapping[str, list[ModelConfig]]) -> str:
    """Return a line for each part: how many families have it, and which backends compute it."""
    names = sorted({part for configs in families.values() for config in configs for part in config.parts}, key=str.lower)
    lines = [f"| part | families | torch | {' | '.join(KERNELS)} |", "| --- | ---: | --- | --- | --- |"]
    for name in names:
        count = sum(any(name in config.parts for config in configs) for configs in families.values())
        computed = ["yes" if name in parts else "" for parts in KERNELS.values()]
        lines.append(f"| {name} | {count} | yes | {' | '.join(computed)} |")
    return "\n".join(lines) + "\n"


def page(text: str) -> str:
    """Return the page with its tables made anew."""
    from transformers.utils import logging

    logging.set_verbosity_error()  # of configs as small as these
    families = {model_type: configs_of(model_type) for model_type in FAMILIES}
    for name, table in (("families", family_table(families)), ("parts", part_table(families))):
        begin, end = f"<!-- {name}: made by python -m tools.families -->\n", f"<!-- end of {name} -->\n"
        before, _, rest = text.partition(begin)
        text = f"{before}{begin}{table}{end}{rest.partition(end)[2]}"
    return text


def main() -> None:
    """Write the tables, or with `--check` compare them."""
    text = PAGE.read_text(encoding="utf-8")
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(page(text), encoding="utf-8")
    elif page(text) != text:
        raise SystemExit("docs/models.md is stale, run `make stubs`")
    else:
        print("the tables of families are fresh")


if __name__ == "__main__":
    main()
