"""A worker says at its start that its ports are open to everybody, where they are."""

from pathlib import Path

import pytest

from pdmesh.runtime.rpc.mesh_secret import MeshSecretConfig, write_secret
from tests.support.certificates import mesh_tls
from tests.support.worker_mesh import Model, running_worker

WARNING = "without --mesh-secret-file and without TLS"


@pytest.mark.parametrize(
    ("host", "guard", "is_open"),
    [("127.0.0.1", "", False), ("0.0.0.0", "", True), ("0.0.0.0", "secret", False), ("0.0.0.0", "tls", False)],
)
async def test_it_warns_where_nothing_tells_the_mesh_from_others(
    model: Model, tmp_path: Path, caplog: pytest.LogCaptureFixture, host: str, guard: str, is_open: bool
) -> None:
    settings = {
        "host": host,
        "advertise": "127.0.0.1",
        "mesh_secret": write_secret(tmp_path / "secret") if guard == "secret" else MeshSecretConfig(),
        **({"tls": mesh_tls()._config} if guard == "tls" else {}),
    }
    async with running_worker(model, **settings):  # type: ignore[arg-type]
        assert (WARNING in caplog.text) is is_open
