"""`external.metrics.k8s.io/v1beta1`, so that HPA does what the policy wants; and the same as plain JSON, for KEDA.

HPA asks the API server, which checks who asks and what he may, and passes it on over TLS with a certificate that proves who it is
(`front_proxy.py`). An HPA with `averageValue: "1"` then asks for as many replicas as the value says.

A decision that is too old is not shown: the answer is 503 and HPA and KEDA leave everything as it is.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from pdmesh.autoscaler.decision import Decision
from pdmesh.autoscaler.kubernetes import selector, times
from pdmesh.autoscaler.kubernetes.wanted import METRIC, Value, Wanted

GROUP, VERSION = "external.metrics.k8s.io", "v1beta1"
_REASONS = {400: "BadRequest", 404: "NotFound", 405: "MethodNotAllowed", 503: "ServiceUnavailable"}
_STALE = "no decision is fresh: routers or workers have not been heard of late, or this process has just started"
Endpoint = Callable[[Request], Awaitable[Response]]


class ExternalMetrics:
    """Both answers, from the same decisions. `namespace`: the one that the metrics are of."""

    def __init__(self, namespace: str, model: str, max_age_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._namespace = namespace
        self._model = model
        self._wanted = Wanted(max_age_s)
        self._clock = clock

    def on_decision(self, decision: Decision, now_s: float) -> None:
        """For the loop; `now_s` is its clock, of which nothing is needed here."""
        self._wanted.decided(decision, self._clock(), time.time())

    def kubernetes_app(self) -> Starlette:
        """What the API server asks."""
        group = f"/apis/{GROUP}"
        routes = [
            _get("/apis", self._groups),
            _get(group, self._group),
            _get(f"{group}/{VERSION}", self._resources),
            _get(f"{group}/{VERSION}/namespaces/{{namespace}}/{{metric}}", self._values),
        ]
        return Starlette(routes=routes, exception_handlers={HTTPException: _refused})

    def json_app(self) -> Starlette:
        """`GET /wanted/decode` answers {"replicas": 3}."""
        return Starlette(routes=[_get("/wanted/{pool}", self._one)], exception_handlers={HTTPException: _refused})

    async def _groups(self, request: Request) -> Response:
        return JSONResponse({"kind": "APIGroupList", "apiVersion": "v1", "groups": [_group()]})

    async def _group(self, request: Request) -> Response:
        return JSONResponse({"kind": "APIGroup", "apiVersion": "v1", **_group()})

    async def _resources(self, request: Request) -> Response:
        metric = {"name": METRIC, "singularName": "", "namespaced": True, "kind": "ExternalMetricValueList", "verbs": ["get"]}
        content = {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": f"{GROUP}/{VERSION}", "resources": [metric]}
        return JSONResponse(content)

    async def _values(self, request: Request) -> Response:
        namespace, metric = request.path_params["namespace"], request.path_params["metric"]
        if metric != METRIC:
            raise HTTPException(404, f"{metric[:100]} is no metric; there is {METRIC}")
        if namespace != self._namespace:
            raise HTTPException(404, f"nothing is known of namespace {namespace[:100]}, only of {self._namespace}")
        try:
            is_meant = selector.parse_selector(request.query_params.get("labelSelector", ""))
        except ValueError as error:
            raise HTTPException(400, str(error)) from None
        items = [self._item(value) for value in self._fresh()]
        chosen = [item for item in items if is_meant(item["metricLabels"])]
        content = {"kind": "ExternalMetricValueList", "apiVersion": f"{GROUP}/{VERSION}", "metadata": {}, "items": chosen}
        return JSONResponse(content)

    async def _one(self, request: Request) -> Response:
        pool = request.path_params["pool"]
        values = {value.pool.value: value for value in self._fresh()}
        if pool not in values:
            raise HTTPException(404, f"{pool[:100]} is no pool; there is {', '.join(values)}")
        return JSONResponse({"pool": pool, "model": self._model, "replicas": values[pool].replicas})

    def _fresh(self) -> tuple[Value, ...]:
        """Raises HTTPException."""
        values = self._wanted.fresh(self._clock())
        if not values:
            raise HTTPException(503, _STALE)
        return values

    def _item(self, value: Value) -> dict[str, Any]:
        labels = {"pool": value.pool.value, "model": self._model}
        return {
            "metricName": METRIC,
            "metricLabels": labels,
            "timestamp": times.time(value.wall_s),
            "value": str(value.replicas),
        }


def _get(path: str, endpoint: Endpoint) -> Route:
    return Route(path, endpoint, methods=["GET"])


def _group() -> dict[str, Any]:
    version = {"groupVersion": f"{GROUP}/{VERSION}", "version": VERSION}
    return {"name": GROUP, "versions": [version], "preferredVersion": version}


async def _refused(request: Request, error: Exception) -> Response:
    """As Kubernetes says it: a Status."""
    assert isinstance(error, HTTPException)
    content = {
        "kind": "Status",
        "apiVersion": "v1",
        "metadata": {},
        "status": "Failure",
        "message": error.detail,
        "reason": _REASONS.get(error.status_code, ""),
        "code": error.status_code,
    }
    return JSONResponse(content, status_code=error.status_code, headers=error.headers)
