"""Recording and alerting rules for Prometheus. Pure.

An objective is a share of requests that must meet a bound; the rest is the error budget. An alert watches its burn rate, over a
long window (it is much) and a short one (it continues), as in Google's "The Site Reliability Workbook", chapter 5: 14.4 times the
allowed rate for an hour uses 2 % of a month's budget, 6 times for six hours 5 %.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

WINDOWS = ("5m", "30m", "1h", "6h")
CLASS = "gen_ai_request_model, tenant, priority"
MODEL = "gen_ai_request_model"
_OURS = 'error_type!~"CANCELLED|INVALID_ARGUMENT|NOT_FOUND|UNAUTHENTICATED|PERMISSION_DENIED|RESOURCE_EXHAUSTED"'
"""Requests that say something about this mesh: neither the client's fault nor rejected."""


@dataclass(frozen=True)
class Rule:
    """Describe a rule. `record` or `alert` is its name; `wait`: for how long an alert's condition must hold."""

    expr: str
    record: str = ""
    alert: str = ""
    wait: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Group:
    """Hold rules that are evaluated one after the other, every `interval`."""

    name: str
    rules: Sequence[Rule]
    interval: str = "30s"


def groups() -> tuple[Group, ...]:
    """Return all groups."""
    return (_objectives(), _fleet(), _alerts())


def _objectives() -> Group:
    """Return rules by class of requests, over each window: `pdmesh:…:ratio_rate5m` and so on."""
    rules = [rule for window in WINDOWS for rule in _objective_rules(window)]
    met = 'error_type="", ttft_met!="false", tpot_met!="false"'
    goodput = f"sum by ({CLASS}) (rate(pdmesh_requests_total{{{met}}}[5m]))"
    return Group("pdmesh-objectives", [*rules, Rule(goodput, record="pdmesh:goodput:rate5m")])


def _objective_rules(window: str) -> list[Rule]:
    rules = []
    for what in ("ttft", "tpot"):
        missed, judged = (_requests(f"{what}_met{matcher}", window) for matcher in ('="false"', '=~"true|false"'))
        rules.append(Rule(_share(missed, judged), record=f"pdmesh:{what}_missed:ratio_rate{window}"))
    asked, failed = _requests(_OURS, window), _requests(f'{_OURS}, error_type!=""', window)
    rules.append(Rule(_share(failed, asked), record=f"pdmesh:errors:ratio_rate{window}"))
    return rules


def _share(part: str, whole: str) -> str:
    """Return the ratio. A class without such a request has no series of them, but a share of 0."""
    return f"({part} or 0 * {whole}) / ({whole} > 0)"


def _requests(matchers: str, window: str) -> str:
    return f"sum by ({CLASS}) (rate(pdmesh_requests_total{{{matchers}}}[{window}]))"


def _fleet() -> Group:
    """Return rules about each process."""
    rate = "rate({}[1m])"
    busy = rate.format("pdmesh_engine_busy_seconds_total")
    return Group(
        "pdmesh-fleet",
        [
            Rule(f"{rate.format('pdmesh_engine_operations_total')} / pdmesh_engine_peak_operations", record="pdmesh:mfu:ratio"),
            Rule(
                f"{rate.format('pdmesh_engine_moved_bytes_total')} / pdmesh_engine_peak_bandwidth",
                record="pdmesh:memory_bandwidth_utilization:ratio",
            ),
            Rule(busy, record="pdmesh:engine_busy:ratio"),
            Rule(
                'pdmesh_kv_blocks{state="used"} / on (instance, job) group_left () pdmesh_kv_blocks_capacity',
                record="pdmesh:kv_occupancy:ratio",
            ),
            Rule(
                "sum by (instance, proposer) (rate(pdmesh_speculation_accepted_total[5m]))"
                " / (sum by (instance, proposer) (rate(pdmesh_speculation_drafted_total[5m])) > 0)",
                record="pdmesh:speculation_accepted:ratio_rate5m",
            ),
        ],
    )


def _alerts() -> Group:
    burns = [alert for what in ("ttft", "tpot") for alert in _burns(what)]
    return Group("pdmesh-alerts", [*burns, *_request_alerts(), *_worker_alerts(), *_autoscaler_alerts()])


def _alert(name: str, expr: str, summary: str, description: str, *, wait: str = "", severity: str = "ticket") -> Rule:
    """Return an alert. A ticket waits for working hours, a page wakes a person."""
    annotations = {"summary": summary, "description": description}
    return Rule(expr, alert=name, wait=wait, labels={"severity": severity}, annotations=annotations)


@dataclass(frozen=True)
class _Burn:
    """Describe a burn rate: `speed` times the allowed one, over both windows."""

    speed: float
    long: str
    short: str
    wait: str
    severity: str


_BURNS = (_Burn(14.4, "1h", "5m", "2m", "page"), _Burn(6.0, "6h", "30m", "15m", "ticket"))


def _burns(what: str) -> list[Rule]:
    words = {"ttft": "time to the first token", "tpot": "time per output token"}[what]
    return [
        _alert(
            f"Pdmesh{what.capitalize()}ObjectiveBurns" + ("Fast" if burn.severity == "page" else "Slowly"),
            " and ".join(_burning(f"pdmesh:{what}_missed:ratio_rate{window}", burn.speed) for window in (burn.long, burn.short)),
            f"{{{{ $labels.gen_ai_request_model }}}}: too many {{{{ $labels.priority }}}} requests of "
            f"{{{{ $labels.tenant }}}} miss their {words}",
            f"{{{{ $value | humanizePercentage }}}} of them over {burn.long}: the budget of the objective is "
            f"used up {burn.speed:g} times as fast as allowed. The dashboard of a request class shows which part grew.",
            wait=burn.wait,
            severity=burn.severity,
        )
        for burn in _BURNS
    ]


def _burning(ratio: str, speed: float) -> str:
    """Return the condition by class, against the error budget of the model's objective: it is the same on all routers, so the
    minimum will do. Missing all is the fastest burn, also for a budget of more than a fourteenth."""
    allowed = f"(1 - min by ({MODEL}) (pdmesh_objective_share))"
    return f"({ratio} >= on ({MODEL}) group_left () clamp_max({speed:g} * {allowed}, 0.9))"


def _request_alerts() -> list[Rule]:
    refused, admitted = (
        f"sum by (tenant, priority) (rate(pdmesh_admission_{what}_total[5m]))" for what in ("refused", "admitted")
    )
    return [
        _alert(
            "PdmeshErrors",
            "pdmesh:errors:ratio_rate1h > 0.01 and pdmesh:errors:ratio_rate5m > 0.01",
            "{{ $labels.gen_ai_request_model }}: {{ $value | humanizePercentage }} of {{ $labels.priority }} requests of "
            "{{ $labels.tenant }} fail",
            "More than 1 % over an hour and still now, refusals and faults of clients not counted.",
            wait="2m",
            severity="page",
        ),
        _alert(
            "PdmeshRefusals",
            f"{refused} / ({refused} + {admitted} > 0) > 0.05",
            "{{ $value | humanizePercentage }} of {{ $labels.priority }} requests of {{ $labels.tenant }} are refused",
            "The reasons are in pdmesh_admission_refused_total: rate is the tenant's own, all others say "
            "that workers are too few.",
            wait="5m",
        ),
        _alert(
            "PdmeshTokenMismatch",
            "sum by (job) (increase(pdmesh_token_mismatches_total[10m])) > 0",
            "A repeated token had another value",
            "Requests that went on elsewhere got other tokens than before: this is a bug, please report it.",
        ),
    ]


def _worker_alerts() -> list[Rule]:
    return [
        _alert(
            "PdmeshKvFull",
            "pdmesh:kv_occupancy:ratio > 0.95",
            "{{ $labels.instance }}: {{ $value | humanizePercentage }} of its KV blocks are in use",
            "Requests wait for KV or are migrated; more decode workers, or a larger pool, would help.",
            wait="5m",
        ),
        _alert(
            "PdmeshTargetDown",
            'up{job=~"pdmesh.*"} == 0',
            "{{ $labels.instance }} shows no metrics",
            "It is down, or its port is not reached: what is known of it is old.",
            wait="1m",
        ),
        _alert(
            "PdmeshWorkerSilent",
            "max by (worker) (pdmesh_router_worker_report_age_seconds) > 5",
            "{{ $labels.worker }} has told routers nothing for {{ $value | humanizeDuration }}",
            "Routers decide by what it said before.",
            wait="30s",
        ),
        _alert(
            "PdmeshBreakerOpen",
            "max by (worker, role) (pdmesh_breaker_open) > 0",
            "{{ $labels.worker }} is left out as {{ $labels.role }} worker",
            "It failed or was slow; `pdmesh status` says why.",
            wait="1m",
        ),
    ]


def _autoscaler_alerts() -> list[Rule]:
    return [
        _alert(
            "PdmeshAutoscalerHolds",
            "max by (reason) (pdmesh_autoscaler_held) > 0 or on () (min(pdmesh_autoscaler_round_age_seconds) > 60)",
            "The autoscaler has changed nothing for a while, because its figures are old or rounds do not end",
            "Its log says what it does not hear; the number of workers stays as it is.",
            wait="5m",
        ),
        _alert(
            "PdmeshStartsFail",
            "sum by (pool) (pdmesh_autoscaler_failed_starts) > 0",
            "{{ $value }} {{ $labels.pool }} workers were asked for and do not come",
            "No room on the cluster, or they end before they serve.",
            wait="5m",
        ),
    ]
