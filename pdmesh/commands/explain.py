"""`pdmesh explain`: the candidates that a request had, what was predicted for each, which was taken and why."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from google.protobuf.json_format import MessageToDict
from rich.console import RenderableType
from rich.text import Text

from pdmesh.commands.options import Connection, flat
from pdmesh.terminal import show, table
from pdmesh.v1 import common_pb2, mesh_pb2

WAYS = ("compute", "fetch", "restore")
"""Ways to have a prompt computed: all that the pool lacks; or first what another worker has, or the worker's own tiers."""
_WAY_HEADERS = ("DECODE", "PREFILL", "TTFT IF COMPUTED", "IF FETCHED", "IF RESTORED", "TAKEN")
_HEADERS = ("DECODE", "PREFILL", "TTFT", "TPOT", "DELAY", "CACHED", "COST", "NOTE")


@dataclass(frozen=True)
class Options:
    """Why did a request go there: pdmesh explain REQUEST_ID. Where would one go: pdmesh explain --prompt "Once upon a time"."""

    request_id: str = field(default="", metadata={"help": "request that the router placed lately", "positional": True})
    prompt: str = field(default="", metadata={"help": "where a request with this prompt would go now; nothing is computed"})
    latest: int = field(default=0, metadata={"help": "the latest so many decisions; without anything else, one"})
    model: str = field(default="", metadata={"help": "model of --prompt; empty while the mesh serves exactly one"})
    max_tokens: int | None = field(default=None, metadata={"help": "of --prompt: most tokens to generate"})
    slo_ttft_ms: int = field(default=0, metadata={"help": "of --prompt: its objective for the first token; 0: the model's"})
    slo_tpot_ms: int = field(default=0, metadata={"help": "of --prompt: its objective for each further token; 0: the model's"})
    json: bool = field(default=False, metadata={"help": "write JSON"})
    connection: Connection = field(default_factory=Connection, metadata=flat())

    def validate(self) -> None:
        """Raise ValueError that names the field."""
        if self.latest < 0 or self.latest > 100:
            raise ValueError("latest: must be between 1 and 100")
        for name in ("slo_ttft_ms", "slo_tpot_ms"):
            if not 0 <= getattr(self, name) < 2**32:
                raise ValueError(f"{name}: must not be negative, nor above {2**32 - 1}")
        if self.max_tokens is not None and not 1 <= self.max_tokens < 2**31:
            raise ValueError("max_tokens: must be at least 1")
        given = [name for name in ("request_id", "prompt", "latest") if getattr(self, name)]
        if len(given) > 1:
            raise ValueError(f"{given[1]}: excludes {given[0]}; give one of them")


def run(options: Options) -> int:
    """Run the command; return 0 when there was something to show."""
    with options.connection.client() as client:
        response = client.explain(_request(options), timeout=options.connection.timeout)
    if options.json:
        print(json.dumps(MessageToDict(response, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)))
        return 0
    shown = [part for decision in response.decisions for part in ("", *decision_lines(decision))]
    show(*(shown[1:] or ["this router has placed no request yet"]))
    return 0


def _request(options: Options) -> mesh_pb2.ExplainRequest:
    if options.request_id:
        return mesh_pb2.ExplainRequest(request_id=options.request_id)
    if not options.prompt:
        return mesh_pb2.ExplainRequest(latest=options.latest or 1)
    generate = mesh_pb2.GenerateRequest(
        model=options.model,
        text=options.prompt,
        sampling=common_pb2.SamplingParams(max_tokens=options.max_tokens),
        options=mesh_pb2.RequestOptions(slo_ttft_ms=options.slo_ttft_ms, slo_tpot_ms=options.slo_tpot_ms),
    )
    return mesh_pb2.ExplainRequest(generate=generate)


def decision_lines(decision: mesh_pb2.Decision) -> list[RenderableType]:
    """Return one decision as lines for the terminal."""
    took = f"{decision.decision_us:.0f} µs with {decision.num_workers} workers"
    head = Text.assemble(
        "request ",
        (decision.request_id, "bold"),
        f" · {decision.num_tokens} tokens · policy {decision.policy}, which took {took} · {decision.age_ms / 1000:.1f} s ago",
    )
    candidates = decision.candidates
    styles = ["good" if candidate.chosen else "" for candidate in candidates]
    tables = [table(_HEADERS, [_row(candidate) for candidate in candidates], styles)] if candidates else []
    return [head, decision.reason, *tables, *_way_lines(candidates), *_engine_lines(candidates), *_observed(decision)]


def _way_lines(candidates: Sequence[mesh_pb2.Candidate]) -> list[RenderableType]:
    """Return a table of the TTFT by each way to have the prompt computed; nothing where computing is the only one."""
    several = [candidate for candidate in candidates if candidate.fetch_ms or candidate.restore_ms]
    if not several:
        return []
    return [table(_WAY_HEADERS, [_way_row(each) for each in several], ["good" if each.chosen else "" for each in several])]


def _way_row(candidate: mesh_pb2.Candidate) -> tuple[str, ...]:
    known = {name: getattr(candidate, f"{name}_ms") for name in WAYS}
    least = min(WAYS, key=lambda name: known[name] or math.inf)
    times = (_ms(known[name]) if known[name] else "" for name in WAYS)
    return (_decode(candidate), candidate.prefill_worker_id or "(local)", *times, least)


def _engine_lines(candidates: Sequence[mesh_pb2.Candidate]) -> list[str]:
    """Return the engines of the candidates' workers, each with whether it draws the same tokens again."""
    found: dict[tuple[str, bool], set[str]] = {}
    for each in candidates:
        if each.engine:
            workers = {each.decode_worker_id, each.prefill_worker_id} - {""}
            found.setdefault((each.engine, each.may_redraw), set()).update(workers)
    return [f"engine {name} ({tokens_of(may_redraw)}): {_few(workers)}" for (name, may_redraw), workers in sorted(found.items())]


def tokens_of(may_redraw: bool) -> str:
    """Return what becomes of tokens that are computed again, in words."""
    return "a repeat may draw other tokens" if may_redraw else "reproducible"


def _few(workers: Iterable[str]) -> str:
    first, *more = sorted(workers)
    return f"{first} and {len(more)} more" if more else first


def _row(candidate: mesh_pb2.Candidate) -> tuple[str, ...]:
    cached = f"{candidate.decode_cached_tokens}+{candidate.prefill_cached_tokens}"
    prefill = candidate.prefill_worker_id or "(local)"
    if not candidate.ttft_ms:  # the policy predicts nothing
        return (_decode(candidate), prefill, "", "", "", cached, "", candidate.note)
    times = (_ms(candidate.ttft_ms), _ms(candidate.tpot_ms), _ms(candidate.delay_ms))
    return (_decode(candidate), prefill, *times, cached, f"{candidate.cost:.3f}", candidate.note)


def _decode(candidate: mesh_pb2.Candidate) -> str:
    return f"{candidate.decode_worker_id} ←" if candidate.chosen else candidate.decode_worker_id


def _observed(decision: mesh_pb2.Decision) -> list[str]:
    if not decision.observed_ttft_ms:
        return []
    tpot = f", TPOT {_ms(decision.observed_tpot_ms)}" if decision.observed_tpot_ms else ""
    return [f"observed: TTFT {_ms(decision.observed_ttft_ms)} after the decision{tpot}", *_reused(decision)]


def _reused(decision: mesh_pb2.Decision) -> list[str]:
    """Return what was fetched and restored, if anything was, and how long it took, also where nothing came."""
    came = [
        f"{count} {how} in {_ms(milliseconds)}"
        for how, count, milliseconds in (
            ("fetched", decision.fetched_tokens, decision.fetch_ms),
            ("restored", decision.restored_tokens, decision.restore_ms),
        )
        if count or milliseconds
    ]
    return [f"of {decision.num_tokens} tokens {decision.cached_tokens} were cached: {', '.join(came)}"] if came else []


def _ms(milliseconds: float) -> str:
    return f"{milliseconds:.1f} ms" if milliseconds < 100 else f"{milliseconds:.0f} ms"
