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


def handoff() -> Dashboard:
    """How KV moves from prefill to decode, and what of it anybody waits for."""
    sent = Row(
        "What moves",
        [
            Panel("Hand-offs", [Query(_rate("pdmesh_kv_handoffs_total", "transport"), "{{transport}}")], "reqps", stacked=True),
            Panel("Bytes", [Query(_rate("pdmesh_kv_sent_bytes_total", "transport"), "{{transport}}")], "Bps"),
            Panel(
                "Bytes of a hand-off",
                [Query(
                    f"{_rate('pdmesh_kv_sent_bytes_total', 'transport')}"
                    f" / ({_rate('pdmesh_kv_handoffs_total', 'transport')} > 0)",
                    "{{transport}}",
                )],
                "bytes",
            ),
        ],
    )  # fmt: skip
    time = Row(
        "What it takes",
        [
            Panel("From its beginning to its commit", quantiles("pdmesh_kv_push_seconds", "", "transport"), "s"),
            Panel(
                "What is left when the first token is there", quantiles("pdmesh_kv_exposed_seconds", "", "transport"), "s",
                text="Exposed: the second token waits for it. The rest hides behind the computation.",
            ),
            Panel(
                "Bytes that nothing hides",
                [Query(
                    f"{_rate('pdmesh_kv_sent_exposed_bytes_total', 'transport')}"
                    f" / ({_rate('pdmesh_kv_sent_bytes_total', 'transport')} > 0)",
                    "{{transport}}",
                )],
                "percentunit", at_most=1,
            ),
            Panel("As clients see it", quantiles("pdmesh_handoff_part_seconds", "", "part"), "s", width=12),
            Panel(
                "What goes wrong",
                [
                    Query(_rate("pdmesh_kv_handoff_failures_total", "instance"), "failed {{instance}}"),
                    Query(_rate("pdmesh_kv_corrupt_parts_total", "instance"), "corrupt parts {{instance}}"),
                    Query(_rate("pdmesh_leases_expired_total", "instance"), "leases expired {{instance}}"),
                ],
                "cps", width=12,
            ),
        ],
    )  # fmt: skip
    return Dashboard("pdmesh-handoff", "pdmesh: hand-off", [sent, time], (), "How KV moves from prefill to decode")


def workers() -> Dashboard:
    """What each worker does, how near it is to its limits, and what speculation brings."""
    name = "{{instance}}"
    limits = Row(
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
    work = Row(
        "What they do",
        [
            Panel("Step time, p50 and p99", quantiles("pdmesh_engine_step_seconds", _WORKER_IS, "kind", (0.5, 0.99)), "s"),
            Panel("Sequences in a step", quantiles("pdmesh_engine_batch_sequences", _WORKER_IS, "instance", (0.5,))),
            Panel("Tokens in a step", quantiles("pdmesh_engine_batch_tokens", _WORKER_IS, "instance", (0.9,))),
            Panel("Sequences", [Query(f"pdmesh_engine_sequences{{{_WORKER_IS}}}", "{{instance}} {{state}}")]),
            Panel("Tokens", [Query(_rate("pdmesh_engine_tokens_total", "instance, kind", _WORKER_IS), "{{instance}} {{kind}}")]),
            Panel(
                "Prompt tokens found in the prefix cache",
                [Query(f"{_prompt_tokens('cached')} / ({_prompt_tokens('cached|prefilled')} > 0)", name)],
                "percentunit", at_most=1,
            ),
            Panel("Preemptions", [Query(_rate("pdmesh_engine_preemptions_total", "instance", _WORKER_IS), name)], "cps"),
            Panel(
                "Left out by routers", [Query("max by (worker, role) (pdmesh_breaker_open)", "{{worker}} {{role}}")], at_most=1,
            ),
            Panel(
                "Since their last report",
                [Query("max by (worker) (pdmesh_router_worker_report_age_seconds)", "{{worker}}")], "s",
            ),
        ],
    )  # fmt: skip
    return Dashboard("pdmesh-workers", "pdmesh: workers", [limits, work, _speculation()], [WORKER], "What each worker does")


def _prompt_tokens(kinds: str) -> str:
    return _rate("pdmesh_engine_tokens_total", "instance", f'{_WORKER_IS}, kind=~"{kinds}"')


def _speculation() -> Row:
    drafted, accepted = (f"pdmesh_speculation_{what}_total" for what in ("drafted", "accepted"))
    return Row(
        "Speculation",
        [
            Panel("Kept of what was drafted", [Query("pdmesh:speculation_accepted:ratio_rate5m", "{{instance}} {{proposer}}")],
                  "percentunit", at_most=1),
            Panel(
                "Kept, by depth",
                [Query(f"{_rate(accepted, 'position')} / ({_rate(drafted, 'position')} > 0)", "{{position}}")],
                "percentunit", at_most=1,
            ),
            Panel(
                "Tokens that a row gives",
                [Query(
                    f"{_rate('pdmesh_speculation_tokens_total', 'instance')}"
                    f" / ({_rate('pdmesh_speculation_rows_total', 'instance')} > 0)", "{{instance}}",
                )],
            ),
            Panel(
                "Time drafting and verifying",
                [
                    Query(_rate("pdmesh_speculation_drafting_seconds_total", "instance"), "drafting {{instance}}"),
                    Query(_rate("pdmesh_speculation_verifying_seconds_total", "instance"), "verifying {{instance}}"),
                ],
                "percentunit", width=24,
            ),
        ],
    )  # fmt: skip


def autoscaler() -> Dashboard:
    """What it decides, from what, and what comes of it."""
    pools = Row(
        "Pools",
        [
            Panel(
                "Wanted, asked for and ready",
                [
                    Query("max by (pool) (pdmesh_autoscaler_wanted)", "{{pool}} wanted"),
                    Query("max by (pool) (pdmesh_autoscaler_replicas)", "{{pool}} there or starting"),
                    Query("max by (pool) (pdmesh_autoscaler_ready)", "{{pool}} ready"),
                ],
                width=12,
            ),
            Panel(
                "Requests: what comes and what is expected",
                [
                    Query(f"sum(rate(pdmesh_arrivals_total{RATE}))", "come"),
                    Query('max(pdmesh_autoscaler_forecast{what="mean"})', "expected"),
                    Query(
                        'max(pdmesh_autoscaler_forecast{what="mean"}) + 2 * max(pdmesh_autoscaler_forecast{what="spread"})',
                        "expected, and two deviations more",
                    ),
                ],
                "reqps", width=12,
            ),
        ],
    )  # fmt: skip
    decisions = Row(
        "Decisions",
        [
            Panel(
                "By change and what held it",
                [Query(_rate("pdmesh_autoscaler_decisions_total", "pool, change, held"), "{{pool}} {{change}} {{held}}")], "cps",
                width=12,
            ),
            Panel("What was done", [Query("sum by (kind) (increase(pdmesh_autoscaler_events_total[10m]))", "{{kind}}")], width=12,
                  text="In ten minutes"),
            Panel("Holds because figures are old", [Query("max by (reason) (pdmesh_autoscaler_held)", "{{reason}}")], at_most=1),
            Panel("Starts that failed", [Query("sum by (pool) (pdmesh_autoscaler_failed_starts)", "{{pool}}")]),
            Panel(
                "Since the latest decision and round",
                [
                    Query("min(pdmesh_autoscaler_decision_age_seconds)", "decision"),
                    Query("min(pdmesh_autoscaler_round_age_seconds)", "round"),
                ],
                "s",
            ),
            Panel(
                "Requests that wait for a worker",
                [
                    Query('sum by (gen_ai_request_model) (pdmesh_unplaced_requests{gen_ai_request_model=~"$model"})',
                          "{{gen_ai_request_model}}"),
                ],
                width=12,
            ),
            Panel(
                "For how long the first of them has",
                [Query('max by (gen_ai_request_model) (pdmesh_unplaced_age_seconds{gen_ai_request_model=~"$model"})',
                       "{{gen_ai_request_model}}")],
                "s", width=12,
            ),
        ],
    )  # fmt: skip
    return Dashboard("pdmesh-autoscaler", "pdmesh: autoscaler", [pools, decisions], [MODEL], "What it decides, and why")
