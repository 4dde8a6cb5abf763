"""Recording and alerting rules for Prometheus. Pure.

An objective is a share of requests that must meet a bound, so what it leaves is a budget of those that may miss it. An alert
looks at how fast that is used up, over a long window (it is much) and a short one (it goes on), as in Google's "The Site
Reliability Workbook", chapter 5: 14.4 times as fast as allowed for an hour uses 2 % of a month's budget, 6 times for six hours
5 %.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

WINDOWS = ("5m", "30m", "1h", "6h")
CLASS = "gen_ai_request_model, tenant, priority"
MODEL = "gen_ai_request_model"
_OURS = 'error_type!~"CANCELLED|INVALID_ARGUMENT|NOT_FOUND|UNAUTHENTICATED|PERMISSION_DENIED|RESOURCE_EXHAUSTED"'
"""Requests that say something about this mesh: neither the client's fault nor refused."""


@dataclass(frozen=True)
class Rule:
    """`record` or `alert` is its name; `wait`: for how long an alert's condition must hold."""

    expr: str
    record: str = ""
    alert: str = ""
    wait: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Group:
    """Rules that are evaluated one after the other, every `interval`."""

    name: str
    rules: Sequence[Rule]
    interval: str = "30s"


def groups() -> tuple[Group, ...]:
    """All of them."""
    return (_objectives(), _fleet(), _alerts())


def _objectives() -> Group:
    """By class of requests, over each window: `pdmesh:…:ratio_rate5m` and so on."""
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
    """A class that has had no such request has no series of them, but a share of 0."""
    return f"({part} or 0 * {whole}) / ({whole} > 0)"


def _requests(matchers: str, window: str) -> str:
    return f"sum by ({CLASS}) (rate(pdmesh_requests_total{{{matchers}}}[{window}]))"


def _fleet() -> Group:
    """Of each process."""
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
    return Group("pdmesh-alerts", [*burns, *_error_alerts(), *_state_alerts()])


@dataclass(frozen=True)
class _Burn:
    """`speed` times as fast as the objective allows, over both windows."""

    speed: float
    long: str
    short: str
    wait: str
    severity: str


_BURNS = (_Burn(14.4, "1h", "5m", "2m", "page"), _Burn(6.0, "6h", "30m", "15m", "ticket"))


def _burns(what: str) -> list[Rule]:
    words = {"ttft": "time to the first token", "tpot": "time per output token"}[what]
    return [
        Rule(
            " and ".join(_burning(f"pdmesh:{what}_missed:ratio_rate{window}", burn.speed) for window in (burn.long, burn.short)),
            alert=f"Pdmesh{what.capitalize()}ObjectiveBurns" + ("Fast" if burn.severity == "page" else "Slowly"),
            wait=burn.wait,
            labels={"severity": burn.severity},
            annotations={
                "summary": f"{{{{ $labels.gen_ai_request_model }}}}: too many {{{{ $labels.priority }}}} requests of "
                f"{{{{ $labels.tenant }}}} miss their {words}",
                "description": f"{{{{ $value | humanizePercentage }}}} of them over {burn.long}: the budget of the objective is "
                f"used up {burn.speed:g} times as fast as allowed. The dashboard of a request class shows which part grew.",
            },
        )
        for burn in _BURNS
    ]


def _burning(ratio: str, speed: float) -> str:
    """By class, against what the model's objective leaves: alike on all routers, so the least of them will do. Missing all is
    the fastest that there is, also for an objective that leaves more than a fourteenth."""
    allowed = f"(1 - min by ({MODEL}) (pdmesh_objective_share))"
    return f"({ratio} >= on ({MODEL}) group_left () clamp_max({speed:g} * {allowed}, 0.9))"


def _error_alerts() -> list[Rule]:
    return [
        Rule(
            "pdmesh:errors:ratio_rate1h > 0.01 and pdmesh:errors:ratio_rate5m > 0.01",
            alert="PdmeshErrors",
            wait="2m",
            labels={"severity": "page"},
            annotations={
                "summary": "{{ $labels.gen_ai_request_model }}: {{ $value | humanizePercentage }} of {{ $labels.priority }} "
                "requests of {{ $labels.tenant }} fail",
                "description": "More than 1 % over an hour and still now, refusals and faults of clients not counted.",
            },
        ),
        Rule(
            "sum by (tenant, priority) (rate(pdmesh_admission_refused_total[5m]))"
            " / (sum by (tenant, priority) (rate(pdmesh_admission_refused_total[5m]))"
            " + sum by (tenant, priority) (rate(pdmesh_admission_admitted_total[5m])) > 0) > 0.05",
            alert="PdmeshRefusals",
            wait="5m",
            labels={"severity": "ticket"},
            annotations={
                "summary": "{{ $value | humanizePercentage }} of {{ $labels.priority }} requests of {{ $labels.tenant }} are "
                "refused",
                "description": "The reasons are in pdmesh_admission_refused_total: rate is the tenant's own, all others say "
                "that workers are too few.",
            },
        ),
        Rule(
            "sum by (job) (increase(pdmesh_token_mismatches_total[10m])) > 0",
            alert="PdmeshTokenMismatch",
            labels={"severity": "ticket"},
            annotations={
                "summary": "A repeated token had another value",
                "description": "Requests that went on elsewhere got other tokens than before: this is a bug, please report it.",
            },
        ),
    ]


def _state_alerts() -> list[Rule]:
    return [
        Rule(
            "pdmesh:kv_occupancy:ratio > 0.95",
            alert="PdmeshKvFull",
            wait="5m",
            labels={"severity": "ticket"},
            annotations={
                "summary": "{{ $labels.instance }}: {{ $value | humanizePercentage }} of its KV blocks are in use",
                "description": "Requests wait for room or are moved away; more decode workers, or a larger pool, would help.",
            },
        ),
        Rule(
            'up{job=~"pdmesh.*"} == 0',
            alert="PdmeshTargetDown",
            wait="1m",
            labels={"severity": "ticket"},
            annotations={
                "summary": "{{ $labels.instance }} shows no metrics",
                "description": "It is down, or its port is not reached: what is known of it is old.",
            },
        ),
        Rule(
            "max by (worker) (pdmesh_router_worker_report_age_seconds) > 5",
            alert="PdmeshWorkerSilent",
            wait="30s",
            labels={"severity": "ticket"},
            annotations={
                "summary": "{{ $labels.worker }} has told routers nothing for {{ $value | humanizeDuration }}",
                "description": "Routers decide by what it said before.",
            },
        ),
        Rule(
            "max by (worker, role) (pdmesh_breaker_open) > 0",
            alert="PdmeshBreakerOpen",
            wait="1m",
            labels={"severity": "ticket"},
            annotations={
                "summary": "{{ $labels.worker }} is left out as {{ $labels.role }} worker",
                "description": "It failed or was slow; `pdmesh status` says why.",
            },
        ),
        Rule(
            "max by (reason) (pdmesh_autoscaler_held) > 0 or on () (min(pdmesh_autoscaler_round_age_seconds) > 60)",
            alert="PdmeshAutoscalerHolds",
            wait="5m",
            labels={"severity": "ticket"},
            annotations={
                "summary": "The autoscaler has changed nothing for a while, because its figures are old or rounds do not end",
                "description": "Its log says what it does not hear; the number of workers stays as it is.",
            },
        ),
        Rule(
            "sum by (pool) (pdmesh_autoscaler_failed_starts) > 0",
            alert="PdmeshStartsFail",
            wait="5m",
            labels={"severity": "ticket"},
            annotations={
                "summary": "{{ $value }} {{ $labels.pool }} workers were asked for and do not come",
                "description": "No room on the cluster, or they end before they serve.",
            },
        ),
    ]
