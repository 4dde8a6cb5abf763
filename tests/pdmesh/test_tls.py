"""`pdmesh tls init`, and what `pdmesh up` makes of certificates."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdmesh import cli
from pdmesh.commands.tls import exports
from pdmesh.commands.up import Options as UpOptions
from pdmesh.launcher.plan import LocalMeshConfig, router_plans, worker_plans
from pdmesh.runtime.config import ConfigError, parse
from pdmesh.runtime.rpc.tls import TlsConfig
from tests.support.certificates import mesh_tls


def test_init_writes_files_that_services_take(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "certificates"
    assert cli.run(["tls", "init", str(folder), "--days", "3"]) == 0
    shown = dict(line.removeprefix("export ").split("=") for line in capsys.readouterr().out.splitlines()[1:])
    TlsConfig(shown["PDMESH_TLS_CERT"], shown["PDMESH_TLS_KEY"], shown["PDMESH_TLS_CA"]).validate()
    assert cli.run(["tls", "init", str(folder)]) == 1
    assert "give another folder" in capsys.readouterr().err


def test_init_with_another_name_says_so() -> None:
    assert exports(TlsConfig("a", "b", "c", "other"))[-1] == "export PDMESH_TLS_NAME=other"


@pytest.mark.parametrize(("argv", "problem"), [([], "--folder: is missing"), (["f", "--name", "a b"], "is no DNS name")])
def test_init_says_what_is_wrong(argv: list[str], problem: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.run(["tls", "init", *argv])
    assert problem in capsys.readouterr().err


def test_every_process_gets_the_certificates_or_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDMESH_TLS_CERT", "a stranger's")
    for tls in (TlsConfig("c", "k", "a"), TlsConfig()):
        config = LocalMeshConfig(model="m", tls=tls)
        for plan in (*worker_plans(config, "", range(2)), *router_plans(config, "")):
            given = [plan.env[f"PDMESH_TLS_{name}"] for name in ("CERT", "KEY", "CA")]
            assert given == [tls.tls_cert, tls.tls_key, tls.tls_ca]


def test_up_takes_certificates_or_makes_them() -> None:
    tls = mesh_tls()._config
    flags = [f"--tls-cert={tls.tls_cert}", f"--tls-key={tls.tls_key}", f"--tls-ca={tls.tls_ca}"]
    assert parse(UpOptions, flags, {}, prog="up").certificates == tls
    with pytest.raises(ConfigError, match=r"^--tls: makes certificates"):
        parse(UpOptions, ["--tls", *flags], {}, prog="up")
