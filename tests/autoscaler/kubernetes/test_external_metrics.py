"""The external metrics over real TLS, as an API server asks; and as KEDA does."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import Any

import pytest

from pdmesh.autoscaler.kubernetes import external_metrics, metrics_server
from pdmesh.autoscaler.kubernetes.external_metrics import Wanted
from pdmesh.autoscaler.kubernetes.metrics_server import MetricsServer
from pdmesh.autoscaler.kubernetes.settings import KubernetesSettings, MetricsSettings
from pdmesh.autoscaler.views import Decision
from pdmesh.runtime.config import ConfigError
from pdmesh.runtime.rpc.certificates import make_certificates
from tests.autoscaler.kubernetes.api_server import ApiServer
from tests.autoscaler.kubernetes.metrics_asked import BASE, DECISION, METRIC, Asked, answered_soon


async def test_hpa_is_told_what_the_policy_wants(server: ApiServer, tmp_path: Path) -> None:
    asked = Asked(server, tmp_path)
    await asked.server.start()
    try:
        status, resources = await asked.get(BASE)
        assert status == 200 and resources["resources"][0]["name"] == "pdmesh_wanted_replicas"
        assert (await asked.get("/apis/external.metrics.k8s.io"))[1]["preferredVersion"]["version"] == "v1beta1"
        asked.server.on_decision(DECISION, 0.0)
        status, found = await asked.get(f"{METRIC}?labelSelector=pool%3Ddecode")
        assert status == 200 and found["kind"] == "ExternalMetricValueList"
        (item,) = found["items"]
        assert (item["value"], item["metricLabels"]) == ("5", {"pool": "decode", "model": "smollm2"})
        assert len((await asked.get(METRIC))[1]["items"]) == 2
        assert await asked.get_json("/wanted/decode") == (200, {"pool": "decode", "model": "smollm2", "replicas": 5})
    finally:
        await asked.server.close()


async def test_what_is_wrong_is_a_status(server: ApiServer, tmp_path: Path) -> None:
    asked = Asked(server, tmp_path)
    await asked.server.start()
    try:
        for path, code, told in (
            (METRIC, 503, "no decision is fresh"),
            (f"{BASE}/namespaces/mesh/other", 404, "there is pdmesh_wanted_replicas"),
            (f"{BASE}/namespaces/theirs/pdmesh_wanted_replicas", 404, "only of mesh"),
            (f"{METRIC}?labelSelector=a%20b", 400, "cannot be read"),
            ("/nowhere", 404, "Not Found"),
        ):
            status, found = await asked.get(path)
            assert (status, found["kind"], found["status"], found["code"]) == (code, "Status", "Failure", code)
            assert told in found["message"]
        asked.server.on_decision(DECISION, 0.0)
        assert (await asked.get_json("/wanted/both"))[0] == 404
    finally:
        await asked.server.close()


async def test_a_decision_that_is_old_or_knows_nothing_is_not_shown(server: ApiServer, tmp_path: Path) -> None:
    asked = Asked(server, tmp_path, max_age_s=0.3)
    await asked.server.start()
    try:
        asked.server.on_decision(DECISION, 0.0)
        assert (await asked.get(METRIC))[0] == 200
        await asyncio.sleep(0.35)
        asked.server.on_decision(Decision(DECISION.pools, held="figures are old"), 0.0)
        assert (await asked.get(METRIC))[0] == 503
        assert (await asked.get_json("/wanted/decode"))[0] == 503
    finally:
        await asked.server.close()


@pytest.mark.parametrize(("names", "shows"), [('["pdmesh"]', False), ('["front-proxy-client"]', True)])
async def test_nobody_but_the_api_server_is_answered(server: ApiServer, tmp_path: Path, names: str, shows: bool) -> None:
    asked = Asked(server, tmp_path, names=names)
    await asked.server.start()
    try:
        with pytest.raises(OSError):
            await asked.get(BASE, shows_certificate=shows)
    finally:
        await asked.server.close()


@pytest.mark.parametrize("trouble", ["refused", "outage", "no CA", "CA that is none"])
async def test_until_the_cluster_says_who_may_ask_nobody_may_and_the_rest_goes_on(
    server: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, trouble: str
) -> None:
    monkeypatch.setattr(metrics_server, "RETRY_S", 0.1)
    asked = Asked(server, tmp_path)
    named = server.objects[metrics_server.CONFIG_MAP]
    match trouble:
        case "refused":
            server.refuse[f"GET {metrics_server.CONFIG_MAP}"] = 403
        case "outage":
            server.stop()
        case "no CA":
            server.put(metrics_server.CONFIG_MAP, named | {"data": {}})
        case _:
            server.put(metrics_server.CONFIG_MAP, named | {"data": {"requestheader-client-ca-file": "none"}})
    await asked.server.start()
    try:
        asked.server.on_decision(DECISION, 0.0)
        assert (await asked.get_json("/wanted/decode"))[0] == 200
        with pytest.raises(OSError):
            await asked.get(METRIC)
        await asyncio.sleep(0.3)
        assert sum("stays closed" in message for message in caplog.messages) == 1
        server.refuse.clear()
        server.put(metrics_server.CONFIG_MAP, named)
        if trouble == "outage":
            server.start()
        assert await answered_soon(asked) == 200
        with pytest.raises(OSError):
            await asked.get(METRIC, shows_certificate=False)
    finally:
        await asked.server.close()


async def test_closing_before_the_port_was_opened_frees_it(server: ApiServer, tmp_path: Path) -> None:
    asked = Asked(server, tmp_path)
    server.stop()
    await asked.server.start()
    await asked.server.close()
    with socket.socket() as again:
        again.bind(("127.0.0.1", asked.server.ports["kubernetes"]))


@pytest.mark.parametrize(("name", "told"), [("client_ca", "client_ca"), ("cert", "cert")])
async def test_files_that_cannot_be_used_are_named_at_the_start(tmp_path: Path, name: str, told: str) -> None:
    tls = make_certificates(tmp_path / "tls", days=30)
    bad = tmp_path / "bad.pem"
    bad.write_text("none")
    files: dict[str, Any] = {"cert": tls.tls_cert, "key": tls.tls_key, "client_ca": tls.tls_ca} | {name: str(bad)}
    made = MetricsServer(MetricsSettings(port=0, **files), KubernetesSettings(namespace="mesh"), "127.0.0.1", "m")
    with pytest.raises(ConfigError, match=told):
        await made.start()
    await made.close()


def test_selectors_are_kubernetes_own() -> None:
    labels = {"pool": "decode", "model": "m"}
    for text in (
        "",
        "pool=decode",
        "pool==decode,model=m",
        "pool!=prefill",
        "pool in (decode, both)",
        "pool",
        "!tier",
        "a notin (b)",
    ):
        assert external_metrics.parse_selector(text)(labels), text
    for text in ("pool=prefill", "pool in (a,b),model=m", "!pool", "tier", "pool notin (decode)", "pool=decode,x=y"):
        assert not external_metrics.parse_selector(text)(labels), text
    for text in ("a b", "=x", "pool in decode", "a=b c"):
        with pytest.raises(ValueError, match="labelSelector"):
            external_metrics.parse_selector(text)


def test_a_hold_keeps_nothing_fresh() -> None:
    wanted = Wanted(10.0)
    wanted.decided(DECISION, 0.0, 0.0)
    wanted.decided(Decision(DECISION.pools, held="stale"), 9.0, 9.0)
    assert len(wanted.fresh(10.0)) == 2 and wanted.fresh(10.1) == ()


@pytest.mark.parametrize(
    ("settings", "told"),
    [({"port": 1}, "cert"), ({"port": 70000, "cert": "a", "key": "b"}, "port"), ({"max_age_s": 0.0}, "max_age_s")],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        MetricsSettings(**settings).validate()
