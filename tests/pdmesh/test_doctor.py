"""The doctor: findings from given machines, its report, its exit code."""

from __future__ import annotations

import hashlib
import json
import os
import socket
from pathlib import Path

import pytest

from kvtransfer.transports.registry import installed, transports_with
from pdmesh import cli
from pdmesh.commands import doctor, up
from pdmesh.doctor import machine, software, transfer
from pdmesh.doctor.machine import Check, State, examine, missing, ok
from pdmesh.engine.kernels.cpu import build, isa
from pdmesh.models.catalogue import KNOWN_MODELS
from pdmesh.platform import capabilities, linux, processor
from tests.support.terminal import plain
from tests.support.tiny_models import make_tiny_model


def test_cpu_features_name_the_tier_that_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(isa.VARIABLE, raising=False)
    best = isa.supported()[0].name
    assert machine.cpu_features().found.partition("; ")[2].startswith(f"kernels: {best}")
    monkeypatch.setenv(isa.VARIABLE, "portable")
    if best != "portable":
        assert f"kernels: portable, which PDMESH_CPU_ISA names, in place of {best}" in machine.cpu_features().found
    monkeypatch.setenv(isa.VARIABLE, "quantum")
    assert "kernels: none, as PDMESH_CPU_ISA names one that does not run here" in machine.cpu_features().found


@pytest.mark.parametrize("is_permitted", [True, False])
def test_matrix_tiles_that_are_not_permitted_are_a_finding(is_permitted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def request() -> None:
        if not is_permitted:
            raise PermissionError("arch_prctl: not here")

    monkeypatch.delenv(isa.VARIABLE, raising=False)
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setattr(processor, "listed", lambda _cpuinfo: isa.by_name("amx").needs)
    monkeypatch.setattr(linux, "request_matrix_tiles", request)
    finding = machine.cpu_features()
    assert finding.found.startswith("amx_bf16, amx_int8, avx512_bf16")
    assert f"; kernels: {'amx' if is_permitted else 'avx512_bf16'}" in finding.found
    assert ("the processor has amx, which the system does not permit" in finding.found) is not is_permitted
    assert (finding.state is State.OK) is is_permitted


def test_cpu_features_without_tiers_say_what_takes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(capabilities.VARIABLE, "cpu_tiers")
    monkeypatch.delenv(isa.VARIABLE, raising=False)
    finding = machine.cpu_features()
    assert finding.state is State.WARN and "kernels: portable" in finding.found
    assert finding.remedy == "leave cpu_tiers out of PDMESH_WITHOUT"


def test_a_quota_of_cores_is_said_and_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "quota_cores", lambda: 1)
    monkeypatch.setattr(machine, "cores_to_share", lambda: [5])
    finding = machine.cores()
    assert finding.state is State.WARN and finding.found.startswith(f"1 usable of {os.cpu_count()}, a quota of 1, ")


def test_this_machine_passes_shared_memory_and_loopback() -> None:
    assert machine.shared_memory().state is State.OK
    assert machine.loopback().state is State.OK


def test_this_machine_moves_kv_over_every_transport() -> None:
    finding = transfer.transports()
    assert finding.state is State.OK, finding
    assert "on this host shm (" in finding.found and "across hosts tcp (" in finding.found
    assert finding.found.startswith("shm ") and finding.found.count("GB/s") == len(installed())


def test_this_machine_lacks_nothing_or_says_what() -> None:
    lacking = {f"no {each.name}" for each in capabilities.lacking()}
    findings = examine(machine.capabilities())
    assert {finding.name for finding in findings} == {"capabilities", *lacking}
    there = next(finding for finding in findings if finding.name == "capabilities").found.split(", ")
    assert len(there) + len(lacking) == len(capabilities.CAPABILITIES)


def test_what_is_taken_away_is_lacking_with_its_loss_and_a_mesh_still_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(capabilities.VARIABLE, capabilities.ALL)
    findings = examine(machine.capabilities())
    assert [finding.name for finding in findings] == ["capabilities", *(f"no {each.name}" for each in capabilities.CAPABILITIES)]
    assert findings[0].found == "none"
    for finding, capability in zip(findings[1:], capabilities.CAPABILITIES, strict=True):
        assert (finding.state, finding.blocks, finding.cost) == (State.WARN, False, capability.lost)
        assert finding.found.endswith("taken away by PDMESH_WITHOUT") and finding.remedy == "leave it out of PDMESH_WITHOUT"
    lines = plain(*doctor.report(findings))
    assert any("no memfd" in line for line in lines)
    assert lines[-1] == "a mesh can run here"


def test_checks_of_the_machine_do_without_what_only_linux_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(capabilities.VARIABLE, capabilities.ALL)
    shared = machine.shared_memory()
    assert shared.state is State.WARN and shared.found == "lacks memfd: taken away by PDMESH_WITHOUT"
    assert machine.cpu_features().state is State.WARN
    assert "does not tell how much of it is free" in machine.memory().found
    assert machine.cores().found.startswith(f"{os.cpu_count()} usable of {os.cpu_count()}")
    moved = transfer.transports()
    assert "on this host tcp (" in moved.found and "shm " not in moved.found


KNOWN = transports_with(None)


def test_kv_transports_that_fail_cost_speed_or_the_hand_off() -> None:
    finding = transfer.judge({"grpc": 0.9e9}, {"shm": "shm: no memfd", "tcp": "tcp: closed"}, KNOWN)
    assert finding.state is State.WARN and "no memfd" in finding.remedy and "tcp: closed" in finding.remedy
    assert finding.found.startswith("grpc 0.90 GB/s; on this host grpc (")
    assert "across hosts none" in transfer.judge({"shm": 3e9}, {"tcp": "closed"}, KNOWN).found
    assert transfer.judge({}, {"tcp": "closed"}, KNOWN).state is State.MISSING
    optional = transfer.judge({"shm": 3e9, "tcp": 2e9}, {"nixl": "nixl: does not load"}, KNOWN)
    assert optional.state is State.WARN and "does not load" in optional.remedy and "loopback" not in optional.remedy


def test_port_that_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        number = server.getsockname()[1]
        assert machine.port(number).state is State.WARN
    assert machine.port(number).state is State.OK


def test_package_that_is_missing_says_what_to_install() -> None:
    finding = software.package("no-such-package", "worker", "workers cannot compute", module="no_such_package")
    assert finding.blocks and finding.remedy == "pip install 'pdmesh[worker]'"
    assert software.package("grpcio", "services", "", module="grpc").state is State.OK


def test_redis_that_does_not_answer() -> None:
    finding = software.redis("redis://:secret@127.0.0.1:1")
    assert finding.blocks and "secret" not in finding.found + finding.cost + finding.remedy
    assert software.redis("nonsense://x").blocks


def test_model_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDMESH_CACHE", str(tmp_path / "empty"))
    known = next(iter(KNOWN_MODELS))
    assert software.model_files(known).state is State.WARN
    assert software.disk(known).state in (State.OK, State.WARN, State.MISSING)
    assert software.model_files(str(tmp_path / "nothing")).blocks
    assert software.model_files(str(make_tiny_model(tmp_path / "tiny"))).state is State.OK
    (tmp_path / "tiny" / "config.json").write_text('{"model_type": "mamba"}')
    refused = software.model_files(str(tmp_path / "tiny"))
    assert refused.blocks and "model_type 'mamba' is not supported" in refused.found


def test_cpu_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDMESH_CACHE", str(tmp_path))
    monkeypatch.delenv("PDMESH_KERNELS_DIR", raising=False)
    monkeypatch.setattr(build, "SOURCES", sources := tmp_path / "sources")
    monkeypatch.setattr(build, "library_path", lambda _tier: tmp_path / build.LIBRARY)
    assert software.cpu_kernels().state is State.WARN
    (tmp_path / build.LIBRARY).touch()
    assert software.cpu_kernels().state is State.OK
    (sources / "prebuilt" / isa.detect().name).mkdir(parents=True)
    ahead = sources / "prebuilt" / isa.detect().name / build.LIBRARY
    ahead.touch()
    damaged = software.cpu_kernels()
    assert "compiled; not used: " in damaged.found and "is damaged" in damaged.found
    content = build.Sources.read(build.KERNELS).stamp.encode()
    ahead.write_bytes(content + hashlib.sha256(content).digest())
    assert "built ahead" in software.cpu_kernels().found
    monkeypatch.setenv(isa.VARIABLE, "quantum")
    assert software.cpu_kernels().blocks and "quantum" in software.cpu_kernels().found


def test_no_compiler_costs_speed_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDMESH_CACHE", str(tmp_path))
    monkeypatch.setenv("PDMESH_KERNELS_DIR", str(tmp_path))
    monkeypatch.setattr(build, "SOURCES", tmp_path)
    monkeypatch.setattr(build, "library_path", _no_compiler)
    finding = software.cpu_kernels()
    assert finding.state is State.MISSING and not finding.blocks and "torch" in finding.cost


def _no_compiler(_tier: isa.Tier) -> Path:
    raise build.NoCompiler("no C++ compiler is on PATH")


@pytest.mark.parametrize(("free", "state"), [(0, State.MISSING), (500_000_000, State.WARN), (50_000_000_000, State.OK)])
def test_disk(free: int, state: State, tmp_path: Path) -> None:
    assert software.judge_disk(free, tmp_path, next(iter(KNOWN_MODELS.values()))).state is state
    assert software.judge_disk(free, tmp_path, None).state is State.OK
    assert "packed weights take 2.0 GB" in software.judge_disk(free, tmp_path, None, 2 * 10**9).found


def test_a_check_that_fails_is_a_finding() -> None:
    def broken() -> Check:
        raise RuntimeError("no idea")

    finding = examine([("thing", broken)])[0]
    assert finding.state is State.WARN and "RuntimeError: no idea" in finding.found


def test_report_names_cost_and_remedy_and_verdict() -> None:
    findings = [ok("a", "fine"), missing("bb", "gone", "everything", "buy one", required=True)]
    assert plain(*doctor.report(findings)) == [
        "OK       a   fine",
        "MISSING  bb  gone",
        "             costs: everything",
        "             do:    buy one",
        "",
        "a mesh cannot run here: bb",
    ]
    assert plain(*doctor.report(findings[:1]))[-1] == "a mesh can run here"


def test_every_port_that_a_mesh_takes_is_looked_at(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        number = taken.getsockname()[1]
        cli.run(["doctor", "--json", "--port", "0", "--http-port", "0", "--console-port", str(number)])
    found = {check["name"]: check for check in json.loads(capsys.readouterr().out)["checks"]}
    assert found[f"port {number}"]["state"] == "WARN" and "--console-port" in found[f"port {number}"]["remedy"]
    usual = up.Options()
    asked = doctor.Options()
    assert (asked.port, asked.http_port, asked.console_port) == (usual.port, usual.http_port, usual.console_port)


def test_exit_code_is_one_only_when_no_mesh_can_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["doctor", "--json", "--port", "0"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["can_run"] and {check["state"] for check in shown["checks"]} <= {"OK", "WARN", "MISSING"}
    assert cli.run(["doctor", "--redis", "redis://127.0.0.1:1"]) == 1
