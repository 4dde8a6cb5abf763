"""Dashboards of what stands behind requests: hand-off, workers, autoscaler."""

from __future__ import annotations

from pdmesh.monitoring.dashboards import MODEL, RATE, overview, quantiles, request_class
from pdmesh.monitoring.panels import Dashboard, Panel, Query, Row, Variable

WORKER = Variable("worker", "instance", "pdmesh_engine_steps_total")
_WORKER_IS = 'instance=~"$worker"'


def all_dashboards() -> tuple[Dashboard, ...]:
    """In the order in which one looks."""
    return (overview(), request_class(), handoff(), workers(), autoscaler())


def _rate(metric: str, by: str, matchers: str = "") -> str:
    selector = f"{metric}{{{matchers}}}" if matchers else metric
    return f"sum by ({by}) (rate({selector}{RATE}))"


def _ratio(part: str, whole: str, by: str) -> Query:
    """Of two counters' rates, a line for each value of the label `by`; none where the whole stands still."""
    return Query(f"{_rate(part, by)} / ({_rate(whole, by)} > 0)", f"{{{{{by}}}}}")


def handoff() -> Dashboard:
    """How KV moves from prefill to decode, and what of it anybody waits for."""
    rows = [_moved(), _taken()]
    return Dashboard("pdmesh-handoff", "pdmesh: hand-off", rows, (), "How KV moves from prefill to decode")


def _moved() -> Row:
    num_bytes = _ratio("pdmesh_kv_sent_bytes_total", "pdmesh_kv_handoffs_total", "transport")
    return Row(
        "What moves",
        [
            Panel("Hand-offs", [Query(_rate("pdmesh_kv_handoffs_total", "transport"), "{{transport}}")], "reqps", stacked=True),
            Panel("Bytes", [Query(_rate("pdmesh_kv_sent_bytes_total", "transport"), "{{transport}}")], "Bps"),
            Panel("Bytes of a hand-off", [num_bytes], "bytes"),
        ],
    )


def _taken() -> Row:
    exposed = _ratio("pdmesh_kv_sent_exposed_bytes_total", "pdmesh_kv_sent_bytes_total", "transport")
    wrong = [
        Query(_rate("pdmesh_kv_handoff_failures_total", "instance"), "failed {{instance}}"),
        Query(_rate("pdmesh_kv_corrupt_parts_total", "instance"), "corrupt parts {{instance}}"),
        Query(_rate("pdmesh_leases_expired_total", "instance"), "leases expired {{instance}}"),
    ]
    return Row(
        "What it takes",
        [
            Panel("From its beginning to its commit", quantiles("pdmesh_kv_push_seconds", "", "transport"), "s"),
            Panel(
                "What is left when the first token is there", quantiles("pdmesh_kv_exposed_seconds", "", "transport"), "s",
                text="Exposed: the second token waits for it. The rest hides behind the computation.",
            ),
            Panel("Bytes that nothing hides", [exposed], "percentunit", at_most=1),
            Panel("As clients see it", quantiles("pdmesh_handoff_part_seconds", "", "part"), "s", width=12),
            Panel("What goes wrong", wrong, "cps", width=12),
        ],
    )  # fmt: skip


def workers() -> Dashboard:
    """What each worker does, how near it is to its limits, and what speculation brings."""
    rows = [_limits(), Row("What they do", [*_steps(), *_states()]), _speculation()]
    return Dashboard("pdmesh-workers", "pdmesh: workers", rows, [WORKER], "What each worker does")


def _limits() -> Row:
    name = "{{instance}}"
    return Row(
        "Against their limits",
        [
            Panel("Time in steps", [Query(f"pdmesh:engine_busy:ratio{{{_WORKER_IS}}}", name)], "percentunit", at_most=1),
            Panel("MFU", [Query(f"pdmesh:mfu:ratio{{{_WORKER_IS}}}", name)], "percentunit",
                  text="Operations of the model a second, of those that this machine was measured to reach"),
            Panel("Memory bandwidth", [Query(f"pdmesh:memory_bandwidth_utilization:ratio{{{_WORKER_IS}}}", name)], "percentunit"),
            Panel("KV blocks in use", [Query(f"pdmesh:kv_occupancy:ratio{{{_WORKER_IS}}}", name)], "percentunit", at_most=1),
            Panel("Processor", [Query(_rate("process_cpu_seconds_total", "instance", _WORKER_IS), name)], "short"),
            Panel("Memory", [Query(f"process_resident_memory_bytes{{{_WORKER_IS}}}", name)], "bytes"),
        ],
    )  # fmt: skip


def _steps() -> list[Panel]:
    tokens = Query(_rate("pdmesh_engine_tokens_total", "instance, kind", _WORKER_IS), "{{instance}} {{kind}}")
    return [
        Panel("Step time, p50 and p99", quantiles("pdmesh_engine_step_seconds", _WORKER_IS, "kind", (0.5, 0.99)), "s"),
        Panel("Sequences in a step", quantiles("pdmesh_engine_batch_sequences", _WORKER_IS, "instance", (0.5,))),
        Panel("Tokens in a step", quantiles("pdmesh_engine_batch_tokens", _WORKER_IS, "instance", (0.9,))),
        Panel("Sequences", [Query(f"pdmesh_engine_sequences{{{_WORKER_IS}}}", "{{instance}} {{state}}")]),
        Panel("Tokens", [tokens]),
    ]


def _states() -> list[Panel]:
    name = "{{instance}}"
    found = Query(f"{_prompt_tokens('cached')} / ({_prompt_tokens('cached|prefilled')} > 0)", name)
    left_out = Query("max by (worker, role) (pdmesh_breaker_open)", "{{worker}} {{role}}")
    silent = Query("max by (worker) (pdmesh_router_worker_report_age_seconds)", "{{worker}}")
    return [
        Panel("Prompt tokens found in the prefix cache", [found], "percentunit", at_most=1),
        Panel("Preemptions", [Query(_rate("pdmesh_engine_preemptions_total", "instance", _WORKER_IS), name)], "cps"),
        Panel("Left out by routers", [left_out], at_most=1),
        Panel("Since their last report", [silent], "s"),
    ]


def _prompt_tokens(kinds: str) -> str:
    return _rate("pdmesh_engine_tokens_total", "instance", f'{_WORKER_IS}, kind=~"{kinds}"')


def _speculation() -> Row:
    kept = Query("pdmesh:speculation_accepted:ratio_rate5m", "{{instance}} {{proposer}}")
    by_depth = _ratio("pdmesh_speculation_accepted_total", "pdmesh_speculation_drafted_total", "position")
    of_a_row = _ratio("pdmesh_speculation_tokens_total", "pdmesh_speculation_rows_total", "instance")
    time = [
        Query(_rate("pdmesh_speculation_drafting_seconds_total", "instance"), "drafting {{instance}}"),
        Query(_rate("pdmesh_speculation_verifying_seconds_total", "instance"), "verifying {{instance}}"),
    ]
    return Row(
        "Speculation",
        [
            Panel("Kept of what was drafted", [kept], "percentunit", at_most=1),
            Panel("Kept, by depth", [by_depth], "percentunit", at_most=1),
            Panel("Tokens that a row gives", [of_a_row]),
            Panel("Time drafting and verifying", time, "percentunit", width=24),
        ],
    )


def autoscaler() -> Dashboard:
    """What it decides, from what, and what comes of it."""
    rows = [_pools(), Row("Decisions", [*_decisions(), *_unplaced()])]
    return Dashboard("pdmesh-autoscaler", "pdmesh: autoscaler", rows, [MODEL], "What it decides, and why")


def _pools() -> Row:
    sizes = [
        Query("max by (pool) (pdmesh_autoscaler_wanted)", "{{pool}} wanted"),
        Query("max by (pool) (pdmesh_autoscaler_replicas)", "{{pool}} there or starting"),
        Query("max by (pool) (pdmesh_autoscaler_ready)", "{{pool}} ready"),
    ]
    mean, spread = (f'max(pdmesh_autoscaler_forecast{{what="{what}"}})' for what in ("mean", "spread"))
    load = [
        Query(f"sum(rate(pdmesh_arrivals_total{RATE}))", "come"),
        Query(mean, "expected"),
        Query(f"{mean} + 2 * {spread}", "expected, and two deviations more"),
    ]
    return Row(
        "Pools",
        [
            Panel("Wanted, asked for and ready", sizes, width=12),
            Panel("Requests: what comes and what is expected", load, "reqps", width=12),
        ],
    )


def _decisions() -> list[Panel]:
    made = Query(_rate("pdmesh_autoscaler_decisions_total", "pool, change, held"), "{{pool}} {{change}} {{held}}")
    done = Query("sum by (kind) (increase(pdmesh_autoscaler_events_total[10m]))", "{{kind}}")
    ages = [Query(f"min(pdmesh_autoscaler_{what}_age_seconds)", what) for what in ("decision", "round")]
    return [
        Panel("By change and what held it", [made], "cps", width=12),
        Panel("What was done", [done], width=12, text="In ten minutes"),
        Panel("Holds because figures are old", [Query("max by (reason) (pdmesh_autoscaler_held)", "{{reason}}")], at_most=1),
        Panel("Starts that failed", [Query("sum by (pool) (pdmesh_autoscaler_failed_starts)", "{{pool}}")]),
        Panel("Since the latest decision and round", ages, "s"),
    ]


def _unplaced() -> list[Panel]:
    return [
        Panel("Requests that wait for a worker", [_by_model("sum", "pdmesh_unplaced_requests")], width=12),
        Panel("For how long the first of them has", [_by_model("max", "pdmesh_unplaced_age_seconds")], "s", width=12),
    ]


def _by_model(how: str, metric: str) -> Query:
    model = "gen_ai_request_model"
    return Query(f'{how} by ({model}) ({metric}{{{model}=~"$model"}})', f"{{{{{model}}}}}")
