"""Explain over real gRPC: what was decided and predicted, what came, and where a request would go."""

from dataclasses import replace
from pathlib import Path

import grpc
import grpc.aio
import pytest

from pdmesh.v1 import common_pb2, mesh_pb2, worker_pb2
from router.api.explain import message_of, reason_of
from router.fleet.worker import Dispatched, Worker
from router.flow_control.ttft_predictor import TtftPredictor
from router.kv_index.index import PromptTokens
from router.lifecycle import stages
from router.routing.cost_model import Overhead, PromptWays
from router.routing.decisions import Decision, Decisions
from router.routing.filters import Candidate, Placement, RoutingRequest
from router.routing.learned import OutputLengths, Overheads
from router.routing.worker_snapshot import Mode
from router.telemetry.timings import RequestTimings
from tests.router import stub_prefill
from tests.router.fleets import running, worker
from tests.router.mesh import Mesh, request, running_mesh
from tests.router.stub_workers import StubWorker
from tests.router.test_policy import DEMAND, choose
from tests.support.waiting import eventually

SPEED = worker_pb2.LatencyModel(fixed_s=1e-3, per_prefill_token_s=1e-4, per_sequence_s=1e-4, num_steps=10)


def tell_speed(stub: StubWorker) -> None:
    silent = stub.load

    def load() -> worker_pb2.LoadReport:
        report = silent()
        report.latency_model.CopyFrom(SPEED)
        return report

    stub.load = load  # type: ignore[method-assign]


async def mesh_that_tells(mesh: Mesh) -> Mesh:
    for stub in mesh.workers.values():
        tell_speed(stub)
    await eventually(lambda: all(view.latency is not None for view in mesh.router.core.fleet.views()))
    return mesh


async def test_a_request_is_explained_and_compared_with_what_came(model_folder: Path) -> None:
    async with running_mesh(model_folder, prefill=2, decode=2, policy="predict") as mesh:
        await mesh_that_tells(mesh)
        asked = request(max_tokens=8)
        asked.options.request_id = "mine"
        overheads = mesh.router.core.overheads
        before = [overheads.between(None, view).ttft_stretch for view in mesh.router.core.fleet.views() if view.decode]
        answer = await mesh.generate(asked)
        after = [overheads.between(None, view).ttft_stretch for view in mesh.router.core.fleet.views() if view.decode]
        (decision,) = (await mesh.stub.Explain(mesh_pb2.ExplainRequest(request_id="mine"))).decisions
        (latest,) = (await mesh.stub.Explain(mesh_pb2.ExplainRequest(latest=5))).decisions
        status = await mesh.stub.GetStatus(mesh_pb2.GetStatusRequest())
    assert before == [1.0, 1.0] != after, "the router learns by how much it was off"
    assert (decision.request_id, decision.policy, decision.num_tokens, decision.num_workers) == ("mine", "predict", 50, 4)
    chosen, *others = decision.candidates
    assert chosen.chosen and not any(other.chosen for other in others)
    assert chosen.decode_worker_id == answer.timings.decode_worker
    assert chosen.prefill_worker_id == answer.timings.prefill_worker == ""
    assert chosen.cost == min(candidate.cost for candidate in decision.candidates)
    assert len(decision.candidates) == 2 + 2 * 2  # LOCAL on each, and each pair
    assert chosen.ttft_ms == pytest.approx(50 * 0.1 + 1 + 2) and chosen.tpot_ms > 1
    assert decision.reason.startswith(f"LOCAL on {chosen.decode_worker_id}: ") and "REMOTE" in decision.reason
    assert 0 < decision.observed_ttft_ms <= answer.timings.ttft_ns / 1e6
    assert decision.observed_tpot_ms == pytest.approx(answer.timings.tpot_ns / 1e6)
    assert latest.request_id == "mine"
    assert status.prediction.num_requests == 1
    error = abs(chosen.ttft_ms - decision.observed_ttft_ms) / decision.observed_ttft_ms
    assert status.prediction.ttft_error == pytest.approx(error)


async def test_a_dry_run_touches_nobody(model_folder: Path) -> None:
    async with running_mesh(model_folder, policy="predict") as mesh:
        ask = mesh_pb2.ExplainRequest(generate=request())
        ask.generate.options.mode = mesh_pb2.PREFILL_MODE_REMOTE
        (decision,) = (await mesh.stub.Explain(ask)).decisions
        chat = mesh_pb2.ChatRequest(messages=[mesh_pb2.ChatMessage(role="user", content="a secret " * 20)])
        (other,) = (await mesh.stub.Explain(mesh_pb2.ExplainRequest(chat=chat))).decisions
        assert not (await mesh.stub.Explain(mesh_pb2.ExplainRequest(latest=1))).decisions
        assert not mesh["d0"].submits and len(mesh.router.core.decisions) == 0
    assert [c.prefill_worker_id for c in decision.candidates] == ["p0"]
    assert "speed not reported" in decision.candidates[0].note
    assert other.num_tokens > 100 and "secret" not in str(other)


async def test_a_dry_run_says_why_nobody_can(model_folder: Path) -> None:
    async with running_mesh(model_folder, prefill=1, decode=0) as mesh:
        (decision,) = (await mesh.stub.Explain(mesh_pb2.ExplainRequest(generate=request()))).decisions
    assert not decision.candidates and "no decode worker" in decision.reason


@pytest.mark.parametrize(
    ("ask", "code", "field"),
    [
        (mesh_pb2.ExplainRequest(), grpc.StatusCode.INVALID_ARGUMENT, "what"),
        (mesh_pb2.ExplainRequest(latest=0), grpc.StatusCode.INVALID_ARGUMENT, "latest"),
        (mesh_pb2.ExplainRequest(latest=101), grpc.StatusCode.INVALID_ARGUMENT, "latest"),
        (mesh_pb2.ExplainRequest(request_id=""), grpc.StatusCode.INVALID_ARGUMENT, "request_id"),
        (mesh_pb2.ExplainRequest(request_id="nobody"), grpc.StatusCode.NOT_FOUND, "request_id"),
        (mesh_pb2.ExplainRequest(generate=mesh_pb2.GenerateRequest()), grpc.StatusCode.INVALID_ARGUMENT, "prompt"),
    ],
)
async def test_wrong_questions(model_folder: Path, ask: mesh_pb2.ExplainRequest, code: grpc.StatusCode, field: str) -> None:
    async with running_mesh(model_folder, prefill=0) as mesh:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await mesh.stub.Explain(ask)
    assert caught.value.code() is code
    assert (caught.value.details() or "").startswith(f"{field}: ")


async def test_other_policies_are_explained_too(model_folder: Path) -> None:
    async with running_mesh(model_folder, prefill=2, decode=2, policy="round-robin") as mesh:
        for number in range(4):
            await mesh.generate(request(range(64 + number, 114 + number)))  # nothing of it is cached
        decisions = (await mesh.stub.Explain(mesh_pb2.ExplainRequest(latest=4))).decisions
    pairs = [(d.candidates[0].decode_worker_id, d.candidates[0].prefill_worker_id) for d in decisions]
    assert len(set(pairs[:2])) == 2 and pairs[:2] == pairs[2:]
    assert all(d.policy == "round-robin" and d.reason.startswith("REMOTE: ") for d in decisions)


async def test_forecast_is_what_the_policy_would_do(model_folder: Path) -> None:
    async with running_mesh(model_folder, policy="predict") as mesh:
        core = mesh.router.core
        prepared = await mesh.router.frontend._preprocessor.from_generate(request(), None)
        forecaster = TtftPredictor(core)
        assert forecaster.forecast(prepared) is None  # nobody says how fast it is
        await mesh_that_tells(mesh)
        forecast = forecaster.forecast(prepared)
        assert forecast is not None and forecast.has_room
        assert forecast.ttft_s == pytest.approx(50e-4 + 1e-3 + 2e-3) and forecast.ahead_s == 0
        assert forecast.idle_tpot_s is None  # nobody asks for less
        hurried = forecaster.forecast(replace(prepared, slo_tpot_ms=1))
        assert hurried is not None and hurried.idle_tpot_s == pytest.approx(1e-3 + 1e-4)
        no_model = replace(prepared, model=replace(prepared.model, name="other"))
        assert forecaster.forecast(no_model) is None


async def test_the_forecast_tells_of_a_worker_that_could_begin_at_once(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One has the prompt's beginning, and a second of others' prompts; the other is idle, and would take five for it."""

    def tell(stub: StubWorker, token_s: float, num_waiting_tokens: int) -> None:
        silent = stub.load

        def load() -> worker_pb2.LoadReport:
            report = silent()
            report.latency_model.per_prefill_token_s = token_s
            report.num_waiting_tokens = num_waiting_tokens
            return report

        monkeypatch.setattr(stub, "load", load)

    async with running_mesh(model_folder, prefill=2, policy="predict") as mesh:
        await mesh_that_tells(mesh)
        core = mesh.router.core
        tell(mesh.workers["p0"], 1e-4, 10_000)
        tell(mesh.workers["p1"], 0.1, 0)
        await eventually(lambda: max(view.num_waiting_tokens for view in core.fleet.views()) == 10_000)
        await eventually(lambda: max(view.latency.per_prefill_token_s for view in core.fleet.views() if view.latency) == 0.1)
        prepared = await mesh.router.frontend._preprocessor.from_generate(request(), None)
        prepared = replace(prepared, mode=Mode.REMOTE)
        unknown = TtftPredictor(core).forecast(prepared)
        assert unknown is not None and unknown.elsewhere is None, "without the prefix it begins later there, and no sooner"
        (holder,) = [view.key for view in core.fleet.views() if view.worker_id == "p0"]
        held = PromptTokens({holder: 48}, {})
        monkeypatch.setattr(core.prefixes, "look_up", lambda _: held)
        forecast = TtftPredictor(core).forecast(prepared)
        assert forecast is not None and forecast.ahead_s > 0.9
        assert forecast.elsewhere is not None and forecast.elsewhere.ahead_s == 0


async def test_what_was_fetched_and_restored_is_said_and_counted(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as workers' timings say it: by request, and by worker."""
    took = common_pb2.PrefillTimings(num_cached_tokens=48, num_fetched_tokens=16, fetch_ns=5_000_000)
    took.num_restored_tokens, took.restore_ns = 24, 2_000_000
    monkeypatch.setattr(stub_prefill, "TIMINGS", took)
    async with running_mesh(model_folder, policy="predict") as mesh:
        await mesh_that_tells(mesh)
        asked = request(max_tokens=4)
        asked.options.request_id, asked.options.mode = "mine", mesh_pb2.PREFILL_MODE_REMOTE
        answer = await mesh.generate(asked)
        (decision,) = (await mesh.stub.Explain(mesh_pb2.ExplainRequest(request_id="mine"))).decisions
        status = await mesh.stub.GetStatus(mesh_pb2.GetStatusRequest())
    assert (answer.timings.fetched_tokens, answer.timings.restored_tokens) == (16, 24)
    assert (decision.cached_tokens, decision.fetched_tokens, decision.restored_tokens) == (48, 16, 24)
    assert (decision.fetch_ms, decision.restore_ms) == (5.0, 2.0)
    counts = {each.info.worker_id: (each.fetched_tokens, each.restored_tokens, each.saved_s) for each in status.workers}
    assert counts == {"p0": (16, 24, pytest.approx(40 * 1e-4 + 1e-3 - 7e-3)), "d0": (0, 0, 0.0)}


@pytest.mark.parametrize("brought_ns", [(25_000_000, 0), (10_000_000, 15_000_000)])
def test_the_time_in_which_kv_is_brought_is_not_learned_as_one_of_calls(brought_ns: tuple[int, int]) -> None:
    """Where decode computes the prompt, it is a part of reserve_ns, which otherwise is the way to the worker."""
    timings = RequestTimings(0)
    restore_ns, fetch_ns = brought_ns
    timings.prefilled(common_pb2.PrefillTimings(reserve_ns=30_000_000, restore_ns=restore_ns, fetch_ns=fetch_ns))
    timings.first_received_ns = 90_000_000
    decision = Decision("r", "predict", 0, 0, 8, 1, choose([worker("d0")]), {}, timings)
    parts = mesh_pb2.Timings(prefill_queue_ns=10_000_000, prefill_compute_ns=40_000_000)
    seen = stages._overhead(decision, parts)
    assert seen is not None and seen.before_s == pytest.approx(0.015)


def test_a_candidate_says_what_each_way_to_have_its_prompt_was_predicted_to_take() -> None:
    holder, prefill = running("d0", 6), worker("p0", fetch_token_s=1e-5, restore_token_s=1e-4)
    demand = replace(DEMAND, mode=Mode.REMOTE, cached_tokens={holder.key: 320}, restorable_tokens={prefill.key: 160})
    placement = choose([prefill, holder], demand)
    decision = Decision("r", "predict", 0, 0, 400, 2, placement, demand.cached_tokens)
    (shown,) = message_of(decision).candidates
    assert shown.ttft_ms == shown.fetch_ms < shown.restore_ms < shown.compute_ms and shown.note.startswith("fetches KV")
    computed = choose([worker("p0"), holder], demand)
    (alone,) = message_of(Decision("r", "predict", 0, 0, 400, 2, computed, demand.cached_tokens)).candidates
    assert alone.ttft_ms == alone.compute_ms == pytest.approx(shown.compute_ms)
    assert not alone.fetch_ms and not alone.restore_ms and "KV" not in alone.note


def test_a_worker_is_counted_to_compute_what_it_neither_restores_nor_fetches() -> None:
    """Where computing is the quickest way, or nothing was predicted, that is all that its pool lacks."""
    holder, prefill = worker("d0"), worker("p0")
    demand = replace(DEMAND, cached_tokens={holder.key: 320, prefill.key: 16}, restorable_tokens={prefill.key: 160})
    rest = demand.num_tokens
    counts = {
        None: rest - 16,
        PromptWays(1.0, 2.0, 3.0): rest - 16,
        PromptWays(3.0, 1.0, 2.0): rest - 160,
        PromptWays(3.0, 2.0, 1.0): rest - 320,
        PromptWays(3.0, fetch_s=1.0): rest - 320,
    }
    assert {ways: demand.computed(prefill, ways) for ways in counts} == counts
    whole = replace(demand, cached_tokens={holder.key: rest})
    assert whole.computed(prefill, PromptWays(3.0, fetch_s=1.0)) == 1


async def test_a_prompt_that_is_fetched_is_no_load_of_the_worker_that_fetches_it(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until the worker's next report."""
    counted: list[int] = []
    really = Worker.dispatched

    def noted(self: Worker, sent: Dispatched) -> None:
        counted.extend([sent.tokens] if sent.tokens else [])
        really(self, sent)

    monkeypatch.setattr(Worker, "dispatched", noted)
    fetching = PromptWays(3.0, fetch_s=1.0)
    monkeypatch.setattr(Placement, "chosen", property(lambda self: Candidate(self.decode, self.prefill, 0, True, ways=fetching)))
    monkeypatch.setattr(RoutingRequest, "computed", lambda self, view, ways: 7 if ways is fetching else 1000)
    async with running_mesh(model_folder, policy="predict") as mesh:
        for mode in (mesh_pb2.PREFILL_MODE_LOCAL, mesh_pb2.PREFILL_MODE_REMOTE):
            asked = request(max_tokens=2)
            asked.options.mode = mode
            await mesh.generate(asked)
    assert counted == [7, 7]  # where it decodes, it computes nothing


def test_reasons_name_the_largest_difference() -> None:
    busy = running("d0", 12)
    assert "sequences that run lose" in reason_of(choose([worker("p0"), busy]))
    assert "no other candidate" in reason_of(choose([busy]))
    assert "the first token comes after" in reason_of(choose([worker("p0", num_waiting_tokens=8000), running("d0", 1)]))
    holder = worker("d0", num_free_blocks=1)
    routing_request = replace(DEMAND, cached_tokens={holder.key: 384})
    assert "d0 has no room" in reason_of(choose([holder, running("d1", 9)], routing_request))


def test_the_ring_is_bounded_and_keeps_the_newest() -> None:
    decisions = Decisions(max_decisions=3)
    placement = choose([worker("d0")])
    for number in range(5):
        decisions.record(Decision(f"r{number % 2}-{number}", "predict", number, 1, 400, 1, placement, {}))
    assert [d.request_id for d in decisions.latest(10)] == ["r0-4", "r1-3", "r0-2"]
    assert [d.made_ns for d in decisions.of_request("r1-3")] == [3]
    assert decisions.of_request("r0-0") == []


def test_errors_are_medians_of_the_compared() -> None:
    decisions, placement = Decisions(), choose([worker("d0")])
    assert placement.chosen is not None and placement.chosen.prediction is not None
    predicted = placement.chosen.prediction
    for factor in (1.0, 2.0, 4.0):
        seen = RequestTimings(0, first_received_ns=10 + round(1e9 * predicted.ttft_s * factor))
        seen.parts.tpot_ns = round(1e9 * predicted.tpot_s / factor)
        decisions.compare(Decision("r", "predict", 10, 1, 400, 1, placement, {}, seen))
    status = decisions.status()
    assert status.num_requests == 3
    assert status.ttft_error == pytest.approx(0.5) and status.tpot_error == pytest.approx(1.0)
    assert status.ttft_bias == pytest.approx(-0.5) and status.tpot_bias == pytest.approx(1.0)


def test_errors_in_both_directions_cancel_in_the_bias_alone() -> None:
    decisions, placement = Decisions(), choose([worker("d0")])
    assert placement.chosen is not None and placement.chosen.prediction is not None
    assert decisions.status().ttft_bias == 0.0
    for share in (0.8, 1.0, 1.25):
        seen = RequestTimings(0, first_received_ns=10 + round(1e9 * placement.chosen.prediction.ttft_s / share))
        decisions.compare(Decision("r", "predict", 10, 1, 400, 1, placement, {}, seen))
    status = decisions.status()
    assert status.ttft_error == pytest.approx(0.2, rel=1e-3) and status.ttft_bias == pytest.approx(0.0, abs=1e-6)
    assert status.tpot_error == status.tpot_bias == 0.0


def test_a_decision_after_the_first_token_observed_none() -> None:
    seen = RequestTimings(0, first_received_ns=10)
    placement = choose([worker("d0")])
    assert Decision("r", "predict", 11, 1, 400, 1, placement, {}, seen).observed_ttft_s is None
    assert Decision("r", "predict", 9, 1, 400, 1, placement, {}, seen).observed_ttft_s == pytest.approx(1e-9)


def test_output_lengths_are_learned_by_tenant() -> None:
    lengths = OutputLengths()
    assert lengths.expected("m", "t", 1000) == 128
    for _ in range(100):
        lengths.observe("m", "", 20)
    lengths.observe("m", "t", 40)
    assert lengths.expected("m", "t", 1000) == 40
    assert lengths.expected("m", "u", 1000) == pytest.approx(20)
    assert lengths.expected("m", "u", 8) == 8
    lengths.observe("m", "z", 0)
    assert lengths.expected("m", "z", 8) == 1
    for _ in range(200):
        lengths.observe("m", "", 60)
    assert lengths.expected("m", "", 1000) == pytest.approx(60, rel=0.1)


def test_overheads_are_learned_by_hosts() -> None:
    over = Overheads()
    here, there = worker("d0"), worker("d1", host_id="there")
    over.observe(worker("p0"), here, Overhead(0.01, 0.02))
    assert over.between(worker("p1"), here) == Overhead(0.01, 0.02)  # another worker of the same host
    assert over.between(worker("p0"), there) == over.between(worker("p9", host_id="else"), there) != Overhead(0.01, 0.02)
    assert over.between(None, here) != Overhead(0.01, 0.02)
    over.observe(worker("p0"), here, Overhead(0.02, 0.02))
    assert over.between(worker("p0"), here).before_s == pytest.approx(0.015)


def test_one_stall_teaches_little_and_a_change_is_learned() -> None:
    over, pair = Overheads(), (worker("p0"), worker("d0"))
    for _ in range(20):
        over.observe(*pair, Overhead(0.01, 0.01))
    over.observe(*pair, Overhead(5.0, 5.0))
    assert over.between(*pair).before_s < 0.02
    for _ in range(60):
        over.observe(*pair, Overhead(0.5, 0.5))
    assert over.between(*pair).after_s == pytest.approx(0.5, rel=0.1)
