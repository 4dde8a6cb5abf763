"""Products, attention, norms and sampling of instruction tiers that laptops have, in a program (kernels_check.cpp) that the
processor runs, or an emulator where it lacks the tier: against double precision, in company and alone, and tier against tier.

Not covered: rotary embeddings and the step as a whole where Python does not run, and how fast a tier is.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from pdmesh.engine.kernels.cpu import build, isa
from tests.engine.kernels.cpu.emulated import Target, target_of

pytestmark = pytest.mark.timeout(400)  # the first test compiles for all tiers
TIERS = ("avx2", "avx_vnni", "neon_dotprod", "neon_bf16", "amx")
# All of them fuse multiplications and additions: they share every bit, but for what instructions of their own round.
OWN_KINDS = {"neon_bf16": {"bf16"}, "amx": {"bits", "bf16"}}
SOURCES = (Path(__file__).with_name("kernels_check.cpp"), build.SOURCES / "sampling.cpp")


@dataclass(frozen=True)
class Report:
    """What the program printed: errors with their bounds, and hashes of results with what they may depend on."""

    errors: dict[str, tuple[float, float]]
    hashes: dict[str, tuple[str, str]]

    @staticmethod
    def of(printed: str) -> Report:
        lines = [line.split() for line in printed.splitlines()]
        errors = {name: (float(error), float(bound)) for kind, name, error, bound in (x for x in lines if len(x) == 4)}
        return Report(errors, {name: (kind, value) for kind, name, value in (x for x in lines if len(x) == 3)})


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Report | str]:
    """The report of each tier, or why there is none."""
    folder = tmp_path_factory.mktemp("kernels")

    def run(name: str) -> Report | str:
        tier = isa.by_name(name)
        try:
            target: Target = target_of(tier)
        except pytest.skip.Exception as skipped:
            return str(skipped)
        target.compile(tier, SOURCES, folder / name)
        return Report.of(target.run(folder / name).decode())

    with ThreadPoolExecutor(2) as pool:
        return dict(zip(TIERS, pool.map(run, TIERS), strict=True))


@pytest.fixture(params=TIERS)
def report(request: pytest.FixtureRequest, reports: dict[str, Report | str]) -> Report:
    found = reports[request.param]
    if isinstance(found, str):
        pytest.skip(found)
    return found


def test_results_are_those_of_double_precision_and_of_any_company(report: Report) -> None:
    assert {"product_int8", "product_int4", "company_wide_bfloat16", "attention_int8", "sampled"} <= set(report.errors)
    wrong = {name: error for name, error in report.errors.items() if not error[0] <= error[1]}
    assert not wrong, f"(error, bound): {wrong}"


def test_tiers_share_their_bits(reports: dict[str, Report | str]) -> None:
    found = {name: report.hashes for name, report in reports.items() if isinstance(report, Report)}
    if len(found) < 2:
        pytest.skip("; ".join(report for report in reports.values() if isinstance(report, str)))
    first = next(iter(found))
    for other in found:
        own = OWN_KINDS.get(first, set()) | OWN_KINDS.get(other, set())
        differ = [name for name, (kind, value) in found[first].items() if found[other][name] != (kind, value) and kind not in own]
        assert not differ, f"{first} and {other} differ in {differ}"
