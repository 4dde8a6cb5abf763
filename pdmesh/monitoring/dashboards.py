"""The dashboards: overview against objectives, one class of requests, hand-off, workers, autoscaler."""

from __future__ import annotations

from pdmesh.monitoring.panels import Dashboard, Panel, Query, Row, Variable

RATE = "[$__rate_interval]"
TTFT, TPOT = "gen_ai_server_time_to_first_token_seconds", "gen_ai_server_time_per_output_token_seconds"
GOOD = ((float("-inf"), "red"), (0.9, "orange"), (0.99, "green"))
MODEL, TENANT, PRIORITY = (
    Variable("model", "gen_ai_request_model", "pdmesh_requests_total"),
    Variable("tenant", "tenant", "pdmesh_requests_total"),
    Variable("priority", "priority", "pdmesh_requests_total"),
)
_MODEL_IS = 'gen_ai_request_model=~"$model"'
_CLASS_IS = f'{_MODEL_IS}, tenant=~"$tenant", priority=~"$priority"'


def quantiles(metric: str, matchers: str, by: str = "", shares: tuple[float, ...] = (0.5, 0.9, 0.99)) -> list[Query]:
    """Return a line of a histogram for each share and each value of the labels `by`."""
    legend = " ".join(f"{{{{{label.strip()}}}}}" for label in by.split(",") if label)
    rate = f"sum by ({', '.join(['le', *([by] if by else [])])}) (rate({metric}_bucket{{{matchers}}}{RATE}))"
    return [
        Query(f"histogram_quantile({share:g}, {rate})", f"p{100 * share:g} {legend}".strip(), exemplars=share == max(shares))
        for share in shares
    ]


def mean(metric: str, matchers: str, by: str) -> str:
    """Return the mean of a histogram."""
    total, count = (f"sum by ({by}) (rate({metric}_{what}{{{matchers}}}{RATE}))" for what in ("sum", "count"))
    return f"{total} / ({count} > 0)"


def _objective(what: str) -> Query:
    return Query(f'max by (priority) (pdmesh_objective_seconds{{{_MODEL_IS}, what="{what}"}})', "objective {{priority}}")


def overview() -> Dashboard:
    """Return the overview: SLO attainment and headroom."""
    objectives = Row("Against the objectives", [*_attainment(), *_latencies()])
    return Dashboard(
        "pdmesh-overview", "pdmesh: overview", [objectives, _traffic()], [MODEL], "Objectives and observed latencies"
    )


def _attainment() -> list[Panel]:
    by_class = "{{gen_ai_request_model}} {{tenant}} {{priority}}"
    return [
        Panel(
            "Requests that meet their TTFT objective",
            [Query(f"1 - pdmesh:ttft_missed:ratio_rate5m{{{_MODEL_IS}}}", by_class)],
            "percentunit", "stat", 6, 5, thresholds=GOOD,
        ),
        Panel(
            "Requests that meet their TPOT objective",
            [Query(f"1 - pdmesh:tpot_missed:ratio_rate5m{{{_MODEL_IS}}}", by_class)],
            "percentunit", "stat", 6, 5, thresholds=GOOD,
        ),
        Panel("Goodput", [Query(f"sum(pdmesh:goodput:rate5m{{{_MODEL_IS}}})", "good")], "reqps", "stat", 6, 5,
              text="Requests that succeeded and met all objectives"),
        Panel("Errors", [Query(f"max(pdmesh:errors:ratio_rate5m{{{_MODEL_IS}}})", "worst class")], "percentunit", "stat", 6,
              5, thresholds=((float("-inf"), "green"), (0.001, "orange"), (0.01, "red"))),
    ]  # fmt: skip


def _latencies() -> list[Panel]:
    return [
        Panel("TTFT", [*quantiles(TTFT, _MODEL_IS), _objective("ttft")], "s", width=12),
        Panel("TPOT", [*quantiles(TPOT, _MODEL_IS), _objective("tpot")], "s", width=12),
        Panel(
            "How fast the budget of the TTFT objective is used up",
            [_burn("ttft", window) for window in ("5m", "1h", "6h")],
            width=12, text="1: as fast as the objective allows. Alerts at 14.4 over an hour and 6 over six.",
        ),
        Panel("How fast that of TPOT is", [_burn("tpot", window) for window in ("5m", "1h", "6h")], width=12),
    ]  # fmt: skip


def _burn(what: str, window: str) -> Query:
    missed = f"max by (gen_ai_request_model) (pdmesh:{what}_missed:ratio_rate{window}{{{_MODEL_IS}}})"
    allowed = "(1 - min by (gen_ai_request_model) (pdmesh_objective_share))"
    return Query(f"{missed} / {allowed}", f"{{{{gen_ai_request_model}}}} over {window}")


def _traffic() -> Row:
    in_flight = [
        Query("sum by (priority) (pdmesh_admission_inflight)", "in flight {{priority}}"),
        Query("sum by (priority) (pdmesh_admission_queued)", "waiting {{priority}}"),
        Query("sum(pdmesh_admission_max_inflight)", "places"),
    ]
    return Row(
        "Traffic",
        [
            Panel("Requests by priority", [_requests("priority", _MODEL_IS)], "reqps", stacked=True),
            Panel("How they end", [_requests("error_type", _MODEL_IS)], "reqps", text="No name: well"),
            Panel(
                "Refused, by reason",
                [Query(f"sum by (reason) (rate(pdmesh_admission_refused_total{RATE}))", "{{reason}}")], "reqps",
            ),
            Panel(
                "Tokens",
                [Query(f"sum by (type) (rate(pdmesh_tokens_total{{{_MODEL_IS}}}{RATE}))", "{{type}}")],
                text="input, output, and cached input",
            ),
            Panel("In flight and waiting", in_flight),
            Panel(
                "Workers",
                [Query("max by (role, state) (sum by (instance, role, state) (pdmesh_router_workers))", "{{role}} {{state}}")],
                text="As the router sees them that knows most",
            ),
        ],
    )  # fmt: skip


def _requests(label: str, matchers: str) -> Query:
    return Query(f"sum by ({label}) (rate(pdmesh_requests_total{{{matchers}}}{RATE}))", f"{{{{{label}}}}}")


def request_class() -> Dashboard:
    """Return where the time of one class of requests goes."""
    rows = [Row("Until the first token", [*_first_tokens(), *_prompts()]), Row("After it", [*_later_tokens(), *_troubles()])]
    return Dashboard("pdmesh-class", "pdmesh: one class of requests", rows, [MODEL, TENANT, PRIORITY], "Where its time goes")


def _first_tokens() -> list[Panel]:
    part_is = f'{_MODEL_IS}, priority=~"$priority"'
    return [
        Panel("TTFT", quantiles(TTFT, _CLASS_IS), "s", width=8),
        Panel(
            "TTFT, all requests",
            [Query(f"sum by (le) (rate({TTFT}_bucket{{{_CLASS_IS}}}{RATE}))", "{{le}}", exemplars=True)],
            "s", "heatmap", 8, text="Dots lead to traces",
        ),
        Panel(
            "What it consists of", [Query(mean("pdmesh_ttft_part_seconds", part_is, "part"), "{{part}}")], "s", stacked=True,
            text="Means of the parts; they add up to the mean TTFT. Of all tenants.",
        ),
        Panel("Its slow end, by part", quantiles("pdmesh_ttft_part_seconds", part_is, "part", (0.99,)), "s"),
    ]  # fmt: skip


def _prompts() -> list[Panel]:
    cached, everything = (f'sum(rate(pdmesh_tokens_total{{{_CLASS_IS}, type="{kind}"}}{RATE}))' for kind in ("cached", "input"))
    return [
        Panel("LOCAL and REMOTE", [_requests("mode", _CLASS_IS)], "reqps", stacked=True),
        Panel("Prompt tokens that were cached", [Query(f"{cached} / ({everything} > 0)", "share")], "percentunit", at_most=1),
    ]


def _later_tokens() -> list[Panel]:
    return [
        Panel("TPOT", quantiles(TPOT, _CLASS_IS), "s"),
        Panel(
            "What a hand-off adds before the second token",
            [Query(mean("pdmesh_handoff_part_seconds", _MODEL_IS, "part"), "{{part}}")], "s", stacked=True,
        ),
        Panel("All of a request", quantiles("gen_ai_server_request_duration_seconds", _CLASS_IS), "s"),
        Panel("Tokens of a request", [_tokens_of_a_request(share) for share in (0.5, 0.95)]),
    ]  # fmt: skip


def _tokens_of_a_request(share: float) -> Query:
    rate = f"sum by (le, gen_ai_token_type) (rate(gen_ai_client_token_usage_bucket{{{_MODEL_IS}}}{RATE}))"
    return Query(f"histogram_quantile({share}, {rate})", f"p{100 * share:g} {{{{gen_ai_token_type}}}}")


def _troubles() -> list[Panel]:
    counted = [
        Query(f"sum(rate(pdmesh_request_retries_total{{{_MODEL_IS}}}{RATE}))", "retries"),
        Query(f"sum(rate(pdmesh_request_resubmissions_total{{{_MODEL_IS}}}{RATE}))", "resubmissions"),
        Query(f"sum(rate(pdmesh_migrations_total{RATE}))", "migrations"),
        Query(f"sum(rate(pdmesh_hedges_total{RATE}))", "hedges"),
    ]
    redrawn = Query(f"sum(rate(pdmesh_token_redrawn_total{RATE}))", "redrawn")
    off_by = quantiles("pdmesh_prediction_deviation_ratio", "", "what", (0.5, 0.9))
    return [
        Panel("Retried, resumed after a loss, migrated, hedged", counted, "reqps"),
        Panel("Repeated tokens that differed, where engines may redraw", [redrawn], text="emitted tokens stay: no fault"),
        Panel("How far predictions are off", off_by, "percentunit", text="|predicted - measured| / measured"),
    ]


# Dashboards of hand-off, workers and autoscaler.


WORKER = Variable("worker", "instance", "pdmesh_engine_steps_total")
_WORKER_IS = 'instance=~"$worker"'


def all_dashboards() -> tuple[Dashboard, ...]:
    """Return all, in the order of reading."""
    return (overview(), request_class(), handoff(), workers(), autoscaler())


def _rate(metric: str, by: str, matchers: str = "") -> str:
    selector = f"{metric}{{{matchers}}}" if matchers else metric
    return f"sum by ({by}) (rate({selector}{RATE}))"


def _ratio(part: str, whole: str, by: str) -> Query:
    """Return the ratio of two counters' rates, a line for each value of the label `by`; none where the whole is idle."""
    return Query(f"{_rate(part, by)} / ({_rate(whole, by)} > 0)", f"{{{{{by}}}}}")


def handoff() -> Dashboard:
    """Return how KV moves from prefill to decode, and the part that delays tokens."""
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
    """Return what each worker does, how near it is to its limits, and what speculation gains."""
    rows = [_limits(), Row("What they do", [*_steps(), *_states()]), _reuse(), _speculation()]
    return Dashboard("pdmesh-workers", "pdmesh: workers", rows, [WORKER], "What each worker does")


def _limits() -> Row:
    name = "{{instance}}"
    return Row(
        "Against their limits",
        [
            Panel("Time in steps", [Query(f"pdmesh:engine_busy:ratio{{{_WORKER_IS}}}", name)], "percentunit", at_most=1),
            Panel("MFU", [Query(f"pdmesh:mfu:ratio{{{_WORKER_IS}}}", name)], "percentunit",
                  text="The model's operations a second, as a share of the machine's measured peak"),
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
        Panel("Circuit breakers that are open", [left_out], at_most=1),
        Panel("Since their last report", [silent], "s"),
    ]


def _prompt_tokens(kinds: str) -> str:
    return _rate("pdmesh_engine_tokens_total", "instance", f'{_WORKER_IS}, kind=~"{kinds}"')


def _reuse() -> Row:
    by_source = [
        Query(f"sum(rate(pdmesh_kv_restored_tokens_total{{{_WORKER_IS}}}{RATE}))", "restored"),
        Query(f"sum(rate(pdmesh_kv_pulled_tokens_total{{{_WORKER_IS}}}{RATE}))", "fetched"),
        Query(f'sum(rate(pdmesh_engine_tokens_total{{{_WORKER_IS}, kind="prefilled"}}{RATE}))', "computed"),
    ]
    sizes = [
        Query(f"pdmesh_kv_tier_size_bytes{{{_WORKER_IS}}}", "{{instance}} {{tier}}"),
        Query(f"pdmesh_kv_tier_capacity_bytes{{{_WORKER_IS}}}", "{{instance}} {{tier}} at most"),
    ]
    return Row(
        "Where KV of prompts comes from",
        [
            Panel("Prompt tokens by source", by_source, stacked=True, width=12,
                  text="A second: restored from the worker's own tiers, fetched from another worker, computed"),
            Panel("KV in tiers", sizes, "bytes", width=12, text="Beneath the pool: the host's memory, a disk, a store"),
        ],
    )  # fmt: skip


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
            Panel("Drafted tokens that were accepted", [kept], "percentunit", at_most=1),
            Panel("Kept, by depth", [by_depth], "percentunit", at_most=1),
            Panel("Tokens per row and step", [of_a_row]),
            Panel("Time drafting and verifying", time, "percentunit", width=24),
        ],
    )


def autoscaler() -> Dashboard:
    """Return what it decides, from what, and the outcome."""
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
        Query(f"{mean} + 2 * {spread}", "forecast plus two standard deviations"),
    ]
    return Row(
        "Pools",
        [
            Panel("Wanted, asked for and ready", sizes, width=12),
            Panel("Requests: observed and forecast", load, "reqps", width=12),
        ],
    )


def _decisions() -> list[Panel]:
    made = Query(_rate("pdmesh_autoscaler_decisions_total", "pool, change, held"), "{{pool}} {{change}} {{held}}")
    done = Query("sum by (kind) (increase(pdmesh_autoscaler_events_total[10m]))", "{{kind}}")
    ages = [Query(f"min(pdmesh_autoscaler_{what}_age_seconds)", what) for what in ("decision", "round")]
    return [
        Panel("By change and reason of a hold", [made], "cps", width=12),
        Panel("What was done", [done], width=12, text="In ten minutes"),
        Panel("Holds because figures are stale", [Query("max by (reason) (pdmesh_autoscaler_held)", "{{reason}}")], at_most=1),
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
