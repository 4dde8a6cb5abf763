"""`pdmesh keys`, in a file and in Redis."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from pdmesh import cli
from pdmesh.runtime.registry.redis_server import EmbeddedRedis
from router.auth import api_keys
from router.auth.api_keys import RedisKeys


def test_new_list_revoke(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys = str(tmp_path / "keys.json")
    assert cli.run(["keys", "new", "app", "--tenant", "team", "--days", "2", "--api-keys", keys]) == 0
    shown = capsys.readouterr().out.strip()
    key = api_keys.read_key_file(Path(keys)).find(shown)
    assert key is not None and (key.name, key.tenant, key.admin) == ("app", "team", False)
    assert key.expires == key.created + 2 * 86_400 and shown not in Path(keys).read_text()

    assert cli.run(["keys", "new", "app", "--api-keys", keys]) == 1
    assert "'app' is there twice" in capsys.readouterr().err
    assert cli.run(["keys", "list", "--api-keys", keys, "--json"]) == 0
    assert [entry["name"] for entry in json.loads(capsys.readouterr().out)] == ["app"]
    assert cli.run(["keys", "list", "--api-keys", keys]) == 0
    assert "team" in capsys.readouterr().out

    assert cli.run(["keys", "revoke", "app", "--api-keys", keys]) == 0
    assert len(api_keys.read_key_file(Path(keys))) == 0
    assert cli.run(["keys", "revoke", "app", "--api-keys", keys]) == 1
    assert "there is no key 'app'" in capsys.readouterr().err


async def test_in_redis(capsys: pytest.CaptureFixture[str]) -> None:
    async with EmbeddedRedis() as redis:
        where = ["--api-keys", redis.url, "--mesh", "m"]
        assert await asyncio.to_thread(cli.run, ["keys", "new", "app", "--admin", *where]) == 0
        shown = capsys.readouterr().out.strip()
        store = RedisKeys(redis.url, "m")
        table = await store.read()
        assert table is not None
        key = table.find(shown)
        assert key is not None and key.admin
        assert await asyncio.to_thread(cli.run, ["keys", "new", "app", *where]) == 1
        assert await asyncio.to_thread(cli.run, ["keys", "revoke", "app", *where]) == 0
        table = await store.read()
        assert table is not None and len(table) == 0
        await store.close()
    assert await asyncio.to_thread(cli.run, ["keys", "list", *where]) == 3


@pytest.mark.parametrize(
    ("argv", "problem"),
    [
        (["list"], "api-keys: is missing"),
        (["new", "--api-keys", "f"], "name: is missing"),
        (["new", "a b", "--api-keys", "f"], "name: must be 1 to 64"),
        (["new", "a", "--tenant", "t" * 200, "--api-keys", "f"], "tenant: must be printable"),
        (["new", "a", "--days", "-1", "--api-keys", "f"], "days: must not be negative"),
    ],
)
def test_what_is_wrong_is_named(argv: list[str], problem: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.run(["keys", *argv])
    assert problem in capsys.readouterr().err
