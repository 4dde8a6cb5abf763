"""The best tier that the processor has is taken; another only by force, and never one that it lacks."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdmesh.engine.kernels.cpu import isa
from pdmesh.platform import capabilities

PORTABLE = isa.by_name("portable")
PROCESSOR = "processor\t: 0\nflags\t\t: fpu sse2 {}\n"


@pytest.fixture(autouse=True)
def all_tiers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(capabilities.VARIABLE, raising=False)


def test_without_tiers_it_is_portable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (cpuinfo := tmp_path / "cpuinfo").write_text(PROCESSOR.format(" ".join(isa.TIERS[0].needs)), encoding="ascii")
    monkeypatch.setenv(capabilities.VARIABLE, "cpu_tiers")
    assert isa.supported(cpuinfo, "x86_64") == (PORTABLE,)


def test_the_best_tier_of_the_processor_is_taken(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    for tier in isa.TIERS:
        cpuinfo.write_text(PROCESSOR.format(" ".join(tier.needs)), encoding="ascii")
        assert isa.detect({}, isa.supported(cpuinfo, "x86_64")) is tier
    assert [tier.name for tier in isa.TIERS] == ["avx512_bf16", "avx512_vnni", "avx2", "portable"]


def test_what_is_unknown_is_portable(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    assert isa.supported(cpuinfo, "x86_64") == (PORTABLE,)
    cpuinfo.write_text(PROCESSOR.format(" ".join(isa.TIERS[0].needs)), encoding="ascii")
    assert isa.supported(cpuinfo, "aarch64") == isa.compilable("aarch64") == (PORTABLE,)


def test_a_forced_tier_is_checked() -> None:
    tiers = (isa.by_name("avx2"), PORTABLE)
    assert isa.detect({"PDMESH_CPU_ISA": "portable"}, tiers) is PORTABLE
    with pytest.raises(ValueError, match=r"PDMESH_CPU_ISA: 'sse9' is no .* avx512_bf16, avx512_vnni, avx2, portable"):
        isa.detect({"PDMESH_CPU_ISA": "sse9"}, tiers)
    with pytest.raises(
        ValueError, match=r"PDMESH_CPU_ISA: this processor does not have avx512_vnni; choose one of avx2, portable"
    ):
        isa.detect({"PDMESH_CPU_ISA": "avx512_vnni"}, tiers)
