"""What this machine can do, by trying it; what PDMESH_WITHOUT takes away; and that nothing else asks for the system's name."""

from __future__ import annotations

import ast
import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from pdmesh import cli
from pdmesh.platform import capabilities, fallbacks, linux, processor
from pdmesh.platform.capabilities import CAPABILITIES, Capability
from tests.structure.measure import ROOT

LINUX = "linux"
PACKAGES = ("pdmesh", "pdmesh_vllm", "router", "prefill_service", "decode_service", "kvtransfer")
OWNERS = {"pdmesh/platform"}
LINUX_NAMES = re.compile(
    r"memfd_create|MFD_\w+|F_(ADD|GET)_SEALS|F_SEAL_\w+|SO_PEERCRED|SCM_CREDENTIALS|MSG_CMSG_CLOEXEC|TCP_USER_TIMEOUT|TCP_INFO"
    r"|sched_[gs]etaffinity|sched_[gs]etattr|prctl|syscall|madvise|MADV_\w+|eventfd\w*|epoll\w*|pidfd_\w+|posix_fadvise|posix_fallocate|O_TMPFILE|O_DIRECT"
    r"|unshare|setns|splice|inotify\w*|signalfd\w*"
)
ASKED_BY_NAME = {
    "pdmesh/engine/kernels/cpu/build.py": "an option of the linker, and the ABI in the name of a cached library",
}


@pytest.fixture(autouse=True)
def nothing_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(capabilities.VARIABLE, raising=False)


@pytest.mark.parametrize("capability", CAPABILITIES, ids=lambda each: each.name)
def test_each_can_be_taken_away(capability: Capability, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(capabilities.VARIABLE, f" {capability.name} ,")
    assert not capability.is_there and capability.is_taken
    assert capability.problem == "taken away by PDMESH_WITHOUT"
    assert capabilities.taken_away() == {capability.name}
    monkeypatch.setenv(capabilities.VARIABLE, "all")
    assert capabilities.lacking() == CAPABILITIES


def test_names_are_unique_and_every_loss_is_said() -> None:
    assert len({each.name for each in CAPABILITIES}) == len(CAPABILITIES)
    assert all(each.what and each.lost for each in CAPABILITIES)


@pytest.mark.parametrize("value", ["memfds", "memfd,memfds", "ALL", "all,memfds", "MEMFD"])
def test_wrong_words_are_named(value: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv(capabilities.VARIABLE, value)
    wrong = value.rpartition(",")[2]
    with pytest.raises(
        ValueError, match=rf"^PDMESH_WITHOUT: '{wrong}' is no capability; give some of abstract_sockets, .*, or all$"
    ):
        capabilities.taken_away()
    assert cli.run(["doctor"]) == cli.EXIT_USAGE
    assert capsys.readouterr().err.startswith(f"pdmesh: PDMESH_WITHOUT: '{wrong}' is no capability")


def test_what_fails_is_lacking_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> None:
        raise OSError(38, "Function not implemented")

    def absent() -> None:
        raise AttributeError("module 'os' has no attribute 'memfd_create'")

    for attempt, reason in ((fails, "Function not implemented"), (absent, "no attribute 'memfd_create'")):
        capability = Capability("new", "what", "lost", attempt)
        monkeypatch.setattr(capabilities, "CAPABILITIES", (capability,))
        assert capabilities.lacking() == (capability,) and reason in capability.problem


@pytest.mark.parametrize("name", ["darwin", "freebsd14"])
def test_on_another_system_every_call_of_linux_is_a_lack_and_no_crash(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The calls ask for the system's name, so that types are checked for each; where it is another, none is made."""
    monkeypatch.setattr("sys.platform", name)
    tried = {each.name: _reason(each) for each in CAPABILITIES}
    from_linux = {"memfd", "peer_credentials", "parent_death", "huge_pages", "touched_pages", "affinity"}
    from_linux |= {"time_slices", "user_timeout"}
    assert {each for each, reason in tried.items() if "Function not implemented" in reason} == from_linux


def _reason(capability: Capability) -> str:
    try:
        capability._try()
    except (OSError, AttributeError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("machine", "cpuinfo", "sysctl", "is_there"),
    [
        ("x86_64", "flags : fma avx2 f16c\n", "", True),
        ("x86_64", "flags : fma sse2\n", "", False),
        ("aarch64", "Features : fp asimd asimddp\n", "", True),
        ("aarch64", "Features : fp asimd\n", "", False),
        ("arm64", "", "hw.optional.arm.FEAT_DotProd: 1\n", True),
        ("arm64", "", "hw.optional.arm.FEAT_DotProd: 0\n", False),
        ("arm64", "", "", False),
        ("riscv64", "flags : avx2 fma f16c asimddp\n", "", False),
    ],
)
def test_tiers_of_processors(machine: str, cpuinfo: str, sysctl: str, is_there: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: machine)
    monkeypatch.setattr(capabilities, "_content", lambda _path: cpuinfo)
    monkeypatch.setattr(processor, "sysctl", lambda *_names: sysctl)
    reason = _reason(capabilities.CPU_TIERS)
    assert reason == "" if is_there else f"no tier of instructions for this processor ({machine})" in reason


def test_fallbacks_of_questions(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ours = tmp_path / "meminfo"
    ours.write_text("MemAvailable: 1 kB\n")
    assert fallbacks.text(ours) == "MemAvailable: 1 kB\n" and fallbacks.text(tmp_path / "none") is None
    monkeypatch.setenv(capabilities.VARIABLE, "proc,cgroups,affinity")
    assert fallbacks.text(Path("/proc/meminfo")) is None and fallbacks.text(Path("/sys/fs/cgroup/cpu.max")) is None
    assert fallbacks.text(ours) is not None
    assert fallbacks.usable_cores() == list(range(os.cpu_count() or 1))
    assert fallbacks.physical_bytes() > 1 << 20


def test_descriptors_that_arrive_are_not_inherited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linux, "CLOSE_RECEIVED_ON_EXEC", 0)
    near, far = socket.socketpair()
    with near, far:
        socket.send_fds(near, [b"x"], [near.fileno()])
        data, (fd,), _ = fallbacks.receive_fds(far, 1, 1)
        assert data == b"x" and not os.get_inheritable(fd)
        os.close(fd)


def test_only_the_platform_package_names_what_only_linux_has() -> None:
    """Everything else asks for a capability, so that it has a fallback."""
    found = [f"{path}:{line}: {name}" for path, line, name in _asked() if path not in ASKED_BY_NAME]
    assert found == []
    assert {path for path, _, _ in _asked()} == set(ASKED_BY_NAME)


def _asked() -> Iterator[tuple[str, int, str]]:
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            name = path.relative_to(ROOT).as_posix()
            if not any(name.startswith(owner) for owner in OWNERS):
                yield from ((name, line, what) for line, what in _linux_alone(path))


def _linux_alone(path: Path) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute) and LINUX_NAMES.fullmatch(node.attr):
            yield node.lineno, node.attr
        elif isinstance(node, ast.Attribute) and ast.unparse(node) == "sys.platform":
            yield node.lineno, "sys.platform"
