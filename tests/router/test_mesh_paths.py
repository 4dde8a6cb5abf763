"""A request's ways through the mesh while nothing breaks: REMOTE, LOCAL, choices, stops, logprobs, resume."""

import asyncio
from pathlib import Path

import pytest

from pdmesh.v1 import common_pb2, mesh_pb2
from tests.router import stub_model
from tests.router.mesh import PROMPT, expected, request, running_mesh
from tests.support.waiting import eventually

REMOTE, LOCAL = mesh_pb2.PREFILL_MODE_REMOTE, mesh_pb2.PREFILL_MODE_LOCAL


async def test_remote(model_folder: Path) -> None:
    async with running_mesh(model_folder) as mesh:
        answer = await mesh.generate(request())
        assert answer.tokens() == expected(8)
        assert answer.text() == stub_model.text_of(expected(8))
        assert answer.last().finish_reason == common_pb2.FINISH_REASON_LENGTH
        assert (answer.started.seed, answer.started.model, answer.started.num_prompt_tokens) == (5, "tiny", len(PROMPT))
        assert answer.completed is not None
        assert answer.completed.usage == mesh_pb2.Usage(prompt_tokens=50, completion_tokens=8, cached_tokens=16)
        assert len(mesh["p0"].prefills) == 1 and len(mesh["d0"].submits) == 1
        await mesh.until_whole()
        assert mesh["d0"].cancels == []


async def test_remote_timings_add_up(model_folder: Path) -> None:
    async with running_mesh(model_folder) as mesh:
        timings = (await mesh.generate(request())).timings
        assert timings.mode == REMOTE
        assert (timings.prefill_worker, timings.decode_worker) == ("p0", "d0")
        assert (timings.kv_bytes, timings.transport, timings.num_retries) == (4096, "tcp", 0)
        assert (timings.prefill_queue_ns, timings.prefill_compute_ns) == (1000, 2000)
        _check_sum(timings)


async def test_local_when_the_prompt_is_short_or_asked_for(model_folder: Path) -> None:
    async with running_mesh(model_folder) as mesh:
        for wanted in (request(PROMPT[:10]), request(mode=LOCAL)):
            answer = await mesh.generate(wanted)
            assert answer.tokens() == expected(8, prompt=wanted.tokens.ids)
            assert (answer.timings.mode, answer.timings.transport, answer.timings.prefill_worker) == (LOCAL, "", "")
            _check_sum(answer.timings)
        assert mesh["p0"].prefills == []
        await mesh.until_whole()


async def test_local_without_a_prefill_worker(model_folder: Path) -> None:
    async with running_mesh(model_folder, prefill=0) as mesh:
        assert (await mesh.generate(request())).tokens() == expected(8)
        assert mesh["d0"].submits[0].mode == LOCAL


def _check_sum(timings: mesh_pb2.Timings) -> None:
    """The parts of TTFT explain it: nothing is counted twice, and little is missed."""
    names = ("route", "admission_queue", "reserve", "prefill_queue", "prefill_compute", "first_token_return", "retry")
    total = sum(getattr(timings, f"{name}_ns") for name in names)
    assert abs(timings.ttft_ns - total) < 20_000_000  # scheduling between the parts, on a busy machine
    assert 0 < timings.ttft_ns <= timings.total_ns


async def test_a_prefix_returns_to_the_worker_that_has_it(model_folder: Path) -> None:
    """Without waiting for reports: what was dispatched ends with the first tokens."""
    async with running_mesh(model_folder, prefill=2, report_period_ms=1000, stream_timeout_s=5.0) as mesh:
        workers = [(await mesh.generate(request([*PROMPT, last], mode=REMOTE))).timings.prefill_worker for last in range(64, 69)]
        assert len(set(workers)) == 1


@pytest.mark.parametrize("mode", [REMOTE, LOCAL])
async def test_waiting_for_room_is_counted_once(model_folder: Path, mode: mesh_pb2.PrefillMode.ValueType) -> None:
    async with running_mesh(model_folder) as mesh:
        mesh["d0"].full = True
        answering = asyncio.create_task(mesh.generate(request(mode=mode)))
        await eventually(lambda: len(mesh["d0"].submits) >= 2)
        await asyncio.sleep(0.3)
        mesh["d0"].full = False
        timings = (await answering).timings
        assert timings.admission_queue_ns > timings.ttft_ns / 2
        _check_sum(timings)


async def test_blocks_of_which_decode_was_not_told_are_given_back(model_folder: Path) -> None:
    """Its lease would not lapse: this router's heartbeats renew it."""
    async with running_mesh(model_folder) as mesh:
        mesh["p0"].prefill_plan = ["untold"]
        assert (await mesh.generate(request(max_tokens=1))).tokens() == expected(1)
        await mesh.until_whole()
        assert len(mesh["d0"].cancels) == 1


async def test_first_token_may_end_it(model_folder: Path) -> None:
    async with running_mesh(model_folder) as mesh:
        answer = await mesh.generate(request(max_tokens=1))
        assert answer.tokens() == expected(1)
        await mesh.until_whole()
        assert mesh["d0"].cancels == []


@pytest.mark.parametrize("mode", [REMOTE, LOCAL])
async def test_choices(model_folder: Path, mode: mesh_pb2.PrefillMode.ValueType) -> None:
    async with running_mesh(model_folder) as mesh:
        answer = await mesh.generate(request(n=3, mode=mode))
        for choice in range(3):
            assert answer.tokens(choice) == expected(8, choice=choice)
        assert answer.completed is not None and answer.completed.usage.completion_tokens == 24
        await mesh.until_whole()


@pytest.mark.parametrize("mode", [REMOTE, LOCAL])
async def test_logprobs_of_every_token(model_folder: Path, mode: mesh_pb2.PrefillMode.ValueType) -> None:
    """The first token's come from prefill: decode does not know them."""
    async with running_mesh(model_folder) as mesh:
        answer = await mesh.generate(request(logprobs=2, mode=mode))
        entries = [entry for delta in answer.deltas for entry in delta.logprobs]
        assert [entry.chosen.token_id for entry in entries] == answer.tokens() == expected(8)
        assert [entry.chosen.logprob for entry in entries] == [-0.5] * 8
        assert "".join(entry.chosen.text for entry in entries) == answer.text()
        assert all(len(entry.top) == 2 for entry in entries)


async def test_stop_string_truncates_and_cancels(model_folder: Path) -> None:
    text = stub_model.text_of(expected(40))
    async with running_mesh(model_folder) as mesh:
        mesh["d0"].pause_at = 30
        answer = await mesh.generate(request(max_tokens=40, stop=[text[10:13]]))
        assert answer.text() == text[:10]
        assert answer.tokens() == expected(13)
        assert (answer.last().finish_reason, answer.last().stop_reason) == (common_pb2.FINISH_REASON_STOP, text[10:13])
        assert answer.completed is not None and answer.completed.usage.completion_tokens == 13
        await mesh.until_whole()
        assert len(mesh["d0"].cancels) == 1


async def test_a_choice_stopped_by_a_string_does_not_end_the_others(model_folder: Path) -> None:
    texts = [stub_model.text_of(expected(20, choice=choice)) for choice in range(2)]
    stop = next(text for start in range(19) if (text := texts[0][start : start + 2]) not in texts[1])
    async with running_mesh(model_folder) as mesh:
        answer = await mesh.generate(request(max_tokens=20, n=2, stop=[stop]))
        assert answer.text(0) == texts[0].partition(stop)[0]
        assert answer.tokens(1) == expected(20, choice=1)
        assert answer.last(1).finish_reason == common_pb2.FINISH_REASON_LENGTH
        await mesh.until_whole()


async def test_resume_continues_text_and_indexes(model_folder: Path) -> None:
    async with running_mesh(model_folder) as mesh:
        state = await mesh.generate(request(max_tokens=12, n=2))
        history = mesh_pb2.Resume(
            seed=5,
            emitted=[
                common_pb2.EmittedChoice(index=0, token_ids=state.tokens(0)[:5]),
                common_pb2.EmittedChoice(index=1, token_ids=state.tokens(1), finish_reason=common_pb2.FINISH_REASON_LENGTH),
            ],
        )
        rest = await mesh.generate(request(max_tokens=12, n=2, resume=history))
        assert rest.started.seed == 5
        assert rest.deltas[0].first_index == 5
        assert state.tokens(0)[:5] + rest.tokens(0) == state.tokens(0)
        assert state.text(0)[:5] + rest.text(0) == state.text(0)
        assert rest.tokens(1) == []
        assert rest.completed is not None and rest.completed.usage.completion_tokens == 24
        assert mesh["d0"].submits[-1].mode == LOCAL


async def test_resume_of_one_choice_may_be_remote(model_folder: Path) -> None:
    async with running_mesh(model_folder) as mesh:
        history = mesh_pb2.Resume(seed=5, emitted=[common_pb2.EmittedChoice(index=0, token_ids=expected(5))])
        answer = await mesh.generate(request(max_tokens=12, resume=history))
        assert expected(5) + answer.tokens() == expected(12)
        assert answer.timings.mode == REMOTE
        assert list(mesh["p0"].prefills[0].request.emitted[0].token_ids) == expected(5)


async def test_resume_of_what_is_complete_asks_no_worker(model_folder: Path) -> None:
    async with running_mesh(model_folder) as mesh:
        history = mesh_pb2.Resume(seed=5, emitted=[common_pb2.EmittedChoice(index=0, token_ids=expected(8))])
        answer = await mesh.generate(request(resume=history))
        assert answer.tokens() == []
        assert answer.last().finish_reason == common_pb2.FINISH_REASON_LENGTH
        assert mesh["d0"].submits == []


async def test_chat_tokenize_models_status(model_folder: Path) -> None:
    async with running_mesh(model_folder, decode=2) as mesh:
        messages = [mesh_pb2.ChatMessage(role="user", content="hello")]
        tokens = await mesh.stub.Tokenize(mesh_pb2.TokenizeRequest(messages=messages))
        chat = mesh_pb2.ChatRequest(messages=messages, sampling=common_pb2.SamplingParams(max_tokens=3, seed=1))
        messages_of_chat = [message async for message in mesh.stub.Chat(chat)]
        started, completed = messages_of_chat[0].started, messages_of_chat[-1].completed
        assert started.num_prompt_tokens == len(tokens.token_ids) > 5
        assert completed.usage.completion_tokens == 3
        (model,) = (await mesh.stub.ListModels(mesh_pb2.ListModelsRequest())).models
        assert (model.name, model.max_context, model.num_prefill_workers, model.num_decode_workers) == ("tiny", 2048, 1, 2)
        status = await mesh.stub.GetStatus(mesh_pb2.GetStatusRequest())
        assert sorted(worker.info.worker_id for worker in status.workers if worker.alive) == ["d0", "d1", "p0"]
        assert status.num_token_mismatches == 0 and not status.registry_connected
