"""Serves the policy's wanted replicas as `external.metrics.k8s.io/v1beta1` for HPA, and as plain JSON for KEDA.

HPA asks the API server, which authenticates and authorizes the caller and forwards the request over TLS with its own client
certificate (`metrics_server.py`). An HPA with `averageValue: "1"` then asks for as many replicas as the value says.

A decision that is too old is not shown: the answer is 503, and HPA and KEDA change nothing.
"""

from __future__ import annotations

import re
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from pdmesh.autoscaler.kubernetes import objects
from pdmesh.autoscaler.views import Decision, PoolName

# The replicas that the policy wants of each pool, for an external scaler. Pure: the time is passed in, in seconds of any
# monotonic clock.


METRIC = "pdmesh_wanted_replicas"


@dataclass(frozen=True)
class Value:
    """Hold the value of one pool; `wall_s`, since 1970, is when it was decided."""

    pool: PoolName
    replicas: int
    wall_s: float


class Wanted:
    """Hold the latest decision while it is fresh. A decision that only reports missing data (`held`) does not count as fresh."""

    def __init__(self, max_age_s: float) -> None:
        self._max_age_s = max_age_s
        self._values: tuple[Value, ...] = ()
        self._decided_s = float("-inf")

    def decided(self, decision: Decision, now_s: float, wall_s: float) -> None:
        """Store another decision."""
        if decision.held is None:
            self._values = tuple(Value(pool.name, pool.replicas, wall_s) for pool in decision.pools)
            self._decided_s = now_s

    def fresh(self, now_s: float) -> tuple[Value, ...]:
        """Return the values of all pools; none if the latest decision is too old."""
        return self._values if now_s - self._decided_s <= self._max_age_s else ()


# Label selectors as the API writes them in a query: `pool=decode,model in (a,b),!x`.


Labels = Mapping[str, str]
_KEY = r"[A-Za-z0-9][A-Za-z0-9._/-]{0,316}"
_VALUE = r"[A-Za-z0-9._-]{0,63}"
_SET = re.compile(rf"({_KEY})\s+(in|notin)\s+\(([^()]*)\)")
_EQUAL = re.compile(rf"({_KEY})\s*(==|=|!=)\s*({_VALUE})")
_EXISTS = re.compile(rf"(!?)\s*({_KEY})")


def parse_selector(text: str) -> Callable[[Labels], bool]:
    """Return a predicate over labels; an empty text matches all. Raises ValueError for an invalid selector."""
    terms = [_term(each.strip()) for each in re.split(r",(?![^()]*\))", text) if text.strip()]
    return lambda labels: all(term(labels) for term in terms)


def _term(text: str) -> Callable[[Labels], bool]:
    if match := _SET.fullmatch(text):
        key, way, values = match[1], match[2], {each.strip() for each in match[3].split(",")}
        return lambda labels: (labels.get(key) in values) == (way == "in")
    if match := _EQUAL.fullmatch(text):
        key, way, value = match[1], match[2], match[3]
        return lambda labels: (labels.get(key) == value) == (way != "!=")
    if match := _EXISTS.fullmatch(text):
        key, is_absent = match[2], bool(match[1])
        return lambda labels: (key in labels) != is_absent
    raise ValueError(f"labelSelector: {text[:100]!r} cannot be read; write it like pool=decode")


GROUP, VERSION = "external.metrics.k8s.io", "v1beta1"
_REASONS = {400: "BadRequest", 404: "NotFound", 405: "MethodNotAllowed", 503: "ServiceUnavailable"}
_STALE = "no decision is fresh: routers or workers have not reported lately, or this process has just started"
Endpoint = Callable[[Request], Awaitable[Response]]


class ExternalMetrics:
    """Serve both answers from the same decisions. `namespace` is that of the metrics."""

    def __init__(self, namespace: str, model: str, max_age_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._namespace = namespace
        self._model = model
        self._wanted = Wanted(max_age_s)
        self._clock = clock

    def on_decision(self, decision: Decision, now_s: float) -> None:
        """Receive the loop's decisions; `now_s` is the loop's clock, which is not needed here."""
        self._wanted.decided(decision, self._clock(), time.time())

    def kubernetes_app(self) -> Starlette:
        """Return the app that answers the API server."""
        group = f"/apis/{GROUP}"
        routes = [
            _get("/apis", self._groups),
            _get(group, self._group),
            _get(f"{group}/{VERSION}", self._resources),
            _get(f"{group}/{VERSION}/namespaces/{{namespace}}/{{metric}}", self._values),
        ]
        return Starlette(routes=routes, exception_handlers={HTTPException: _refused})

    def json_app(self) -> Starlette:
        """Return the app that answers `GET /wanted/decode` with {"replicas": 3}."""
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
            raise HTTPException(404, f"{metric[:100]} is not a metric; there is {METRIC}")
        if namespace != self._namespace:
            raise HTTPException(404, f"nothing is known of namespace {namespace[:100]}, only of {self._namespace}")
        try:
            is_meant = parse_selector(request.query_params.get("labelSelector", ""))
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
            raise HTTPException(404, f"{pool[:100]} is not a pool; there is {', '.join(values)}")
        return JSONResponse({"pool": pool, "model": self._model, "replicas": values[pool].replicas})

    def _fresh(self) -> tuple[Value, ...]:
        """Return the fresh values. Raises HTTPException without any."""
        values = self._wanted.fresh(self._clock())
        if not values:
            raise HTTPException(503, _STALE)
        return values

    def _item(self, value: Value) -> dict[str, Any]:
        labels = {"pool": value.pool.value, "model": self._model}
        return {
            "metricName": METRIC,
            "metricLabels": labels,
            "timestamp": objects.time(value.wall_s),
            "value": str(value.replicas),
        }


def _get(path: str, endpoint: Endpoint) -> Route:
    return Route(path, endpoint, methods=["GET"])


def _group() -> dict[str, Any]:
    version = {"groupVersion": f"{GROUP}/{VERSION}", "version": VERSION}
    return {"name": GROUP, "versions": [version], "preferredVersion": version}


async def _refused(request: Request, error: Exception) -> Response:
    """Return the error in Kubernetes' form, a Status."""
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
