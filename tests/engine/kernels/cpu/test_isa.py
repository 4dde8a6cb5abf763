"""The best tier that the processor has is taken; another only by force, and never one that it lacks."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdmesh.engine.kernels.cpu import isa
from pdmesh.platform import capabilities, linux, processor

PORTABLE = isa.by_name("portable")
X86_64 = ["amx", "avx512_bf16", "avx512_vnni", "avx_vnni", "avx2", "portable"]
ARM64 = ["neon_bf16", "neon_dotprod", "portable"]
PROCESSORS = {
    "x86_64": "processor\t: 0\nflags\t\t: fpu sse2 {}\n",
    "aarch64": "processor\t: 0\nBogoMIPS\t: 50.00\nFeatures\t: fp asimd {}\n",
}


@pytest.fixture(autouse=True)
def all_tiers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(capabilities.VARIABLE, raising=False)


def test_without_tiers_it_is_portable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (cpuinfo := tmp_path / "cpuinfo").write_text(PROCESSORS["x86_64"].format(" ".join(isa.TIERS[0].needs)), encoding="ascii")
    monkeypatch.setenv(capabilities.VARIABLE, "cpu_tiers")
    assert isa.supported(cpuinfo, "x86_64") == (PORTABLE,)


@pytest.mark.parametrize(("machine", "names"), [("x86_64", X86_64), ("aarch64", ARM64)])
def test_the_best_tier_of_the_processor_is_taken(machine: str, names: list[str], tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    for tier in isa.compilable(machine):
        if not tier.may_run():
            continue  # this processor, or this system, does not let it
        cpuinfo.write_text(PROCESSORS[machine].format(" ".join(tier.needs)), encoding="ascii")
        assert isa.detect({}, isa.supported(cpuinfo, machine)) is tier
    assert [tier.name for tier in isa.compilable(machine)] == names
    assert set(isa.compilable(machine)) <= set(isa.TIERS)


@pytest.fixture
def amx_cpuinfo(tmp_path: Path) -> Path:
    """What Linux says of a processor with matrix tiles."""
    path = tmp_path / "amx"
    path.write_text(PROCESSORS["x86_64"].format(" ".join(isa.by_name("amx").needs)), encoding="ascii")
    return path


def test_tiles_are_not_used_without_permission(monkeypatch: pytest.MonkeyPatch, amx_cpuinfo: Path) -> None:
    def refuses() -> None:
        raise PermissionError("arch_prctl: not here")

    for request, best in ((refuses, "avx512_bf16"), (lambda: None, "amx")):
        monkeypatch.setattr(linux, "request_matrix_tiles", request)
        tiers = isa.supported(amx_cpuinfo, "x86_64")
        assert isa.detect({}, tiers).name == best
        assert [tier.name for tier in isa.refused(amx_cpuinfo, "x86_64")] == (["amx"] if request is refuses else [])


def test_a_forced_tier_that_is_not_permitted_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    amx = isa.by_name("amx")
    monkeypatch.setattr(isa, "refused", lambda: (amx,))
    with pytest.raises(ValueError, match=r"PDMESH_CPU_ISA: the system does not let this process use amx; choose one of portable"):
        isa.detect({"PDMESH_CPU_ISA": "amx"}, (PORTABLE,))


def test_taken_tiers_are_not_refused_and_nothing_is_requested(monkeypatch: pytest.MonkeyPatch, amx_cpuinfo: Path) -> None:
    monkeypatch.setenv(capabilities.VARIABLE, "cpu_tiers")
    monkeypatch.setattr(linux, "request_matrix_tiles", lambda: pytest.fail("the system was asked for tiles"))
    assert isa.supported(amx_cpuinfo, "x86_64") == (PORTABLE,)
    assert isa.refused(amx_cpuinfo, "x86_64") == ()


def test_other_systems_and_processors_have_no_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "darwin")
    with pytest.raises(OSError, match="ARCH_REQ_XCOMP_PERM"):
        linux.request_matrix_tiles()


@pytest.mark.parametrize("machine", ["x86_64", "aarch64", "arm64"])
def test_the_capability_needs_what_the_least_tier_needs(machine: str) -> None:
    assert processor.LEAST[machine] == isa.compilable(machine)[-2].needs


def test_features_of_x86_and_arm() -> None:
    assert processor.listed("processor : 0\nflags\t\t: fpu avx2 fma\nflags : none\n") == {"fpu", "avx2", "fma"}
    assert processor.listed("Features : fp asimd bf16") == {"fp", "asimd", "bf16"}
    assert processor.listed("") == frozenset()


def test_macos_is_asked_for_the_instructions_of_its_processor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    m1 = "hw.optional.arm.FEAT_DotProd: 1\nhw.optional.arm.FEAT_I8MM: 0\nhw.optional.arm.FEAT_BF16: 0\n"
    for output, name in ((m1, "neon_dotprod"), (m1.replace(": 0", ": 1"), "neon_bf16"), ("", "portable")):
        monkeypatch.setattr(processor, "sysctl", lambda *names, output=output: output)
        assert isa.supported(tmp_path / "nothing", "arm64")[0].name == name


def test_what_is_unknown_is_portable(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    assert isa.supported(cpuinfo, "x86_64") == (PORTABLE,)
    cpuinfo.write_text(PROCESSORS["x86_64"].format(" ".join(isa.TIERS[0].needs)), encoding="ascii")
    assert isa.supported(cpuinfo, "aarch64") == isa.supported(cpuinfo, "riscv64") == isa.compilable("riscv64") == (PORTABLE,)


def test_a_forced_tier_is_checked() -> None:
    tiers = (isa.by_name("avx2"), PORTABLE)
    assert isa.detect({"PDMESH_CPU_ISA": "portable"}, tiers) is PORTABLE
    with pytest.raises(
        ValueError, match=r"PDMESH_CPU_ISA: 'sse9' is no .* avx512_bf16, .* avx2, neon_bf16, neon_dotprod, portable"
    ):
        isa.detect({"PDMESH_CPU_ISA": "sse9"}, tiers)
    with pytest.raises(
        ValueError, match=r"PDMESH_CPU_ISA: this processor does not have avx512_vnni; choose one of avx2, portable"
    ):
        isa.detect({"PDMESH_CPU_ISA": "avx512_vnni"}, tiers)
