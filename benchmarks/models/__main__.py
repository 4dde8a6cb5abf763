"""`make bench-models`: equal tokens of every family, the native speed of six families beside llama.cpp on the same shape, and
what formats of quantized checkpoints cost.

    python -m benchmarks.models [--only equality,speed,quantized] [--variants mixtral,gemma2] [--quick]

Parts go to `benchmarks/results/models.json` as soon as they are through; a run with fewer variants only prints.
"""

from __future__ import annotations

import argparse

from benchmarks.harness import Figure, Suite
from benchmarks.models import equality, quantized, speed
from tests.support.tiny_families import VARIANTS

QUICK_VARIANTS = ("gemma2", "mixtral", "deepseek_v3")
SUITE = Suite("models", ("equality", "speed", "quantized"))


def variants_of(given: str, *, quick: bool) -> list[str]:
    """Return the named variants; all, or a few where it is to be quick, without a name. A name with a comma in it is given with
    a semicolon between names. Raises ValueError naming one that is not known."""
    names = [name.strip() for name in given.split(";" if ";" in given else ",") if name.strip()]
    names = [given] if given in VARIANTS else names
    if unknown := [name for name in names if name not in VARIANTS]:
        raise ValueError(f"variants: there is no {unknown[0]!r}; there are {'; '.join(VARIANTS)}")
    return names or list(QUICK_VARIANTS if quick else VARIANTS)


def parse() -> tuple[argparse.Namespace, list[str]]:
    parser = SUITE.parser(__doc__)
    parser.add_argument("--variants", default="", help="of the tiny families; empty: all")
    arguments, names = SUITE.arguments(parser)
    arguments.is_whole = not (arguments.variants or arguments.quick)
    try:
        arguments.variants = variants_of(arguments.variants, quick=arguments.quick)
    except ValueError as error:
        parser.error(str(error))
    return arguments, names


def main() -> None:
    """Run the chosen parts."""
    arguments, names = parse()

    def measure(part: str) -> list[Figure]:
        if part == "equality":
            return list(equality.figures(equality.measure(arguments.variants)))
        if part == "speed":
            return speed.measure(quick=arguments.quick)
        return quantized.measure(quick=arguments.quick)

    SUITE.main(names, measure, quick=not arguments.is_whole)


if __name__ == "__main__":
    main()
