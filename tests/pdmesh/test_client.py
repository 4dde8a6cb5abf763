"""The client library against scripted routers: events, errors, resume, overload, cancellation, deadlines; sync and async."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack

import pytest

from pdmesh import errors
from pdmesh.client.client import AsyncClient, Client, Completed, Delta, Event, Message, Started
from pdmesh.client.types import FinishReason, GenerateOptions, PrefillMode, ReleasedSession
from pdmesh.v1 import common_pb2, mesh_pb2
from tests.pdmesh.fake_mesh import FINGERPRINT, NUM_TOKENS, SEED, FakeRouter, Script, delta, start_router, text, token
from tests.support.waiting import eventually

Collect = Callable[..., Coroutine[None, None, list[Event]]]
Routers = Callable[..., Coroutine[None, None, FakeRouter]]


@pytest.fixture
async def routers() -> AsyncIterator[Routers]:
    async with AsyncExitStack() as stack:

        async def start(script: Script | None = None) -> FakeRouter:
            router = await start_router(script)
            stack.push_async_callback(router.stop)
            return router

        yield start


async def collect_sync(
    addresses: list[str],
    *,
    timeout: float | None = None,
    resume_timeout_s: float = 5.0,
    retry_overload: bool = False,
    **options: object,
) -> list[Event]:
    def run() -> list[Event]:
        with Client(addresses, resume_timeout_s=resume_timeout_s, retry_overload=retry_overload) as client:
            return list(client.generate_stream("hello", timeout=timeout, **_options(options)))

    return await asyncio.to_thread(run)


async def collect_async(
    addresses: list[str],
    *,
    timeout: float | None = None,
    resume_timeout_s: float = 5.0,
    retry_overload: bool = False,
    **options: object,
) -> list[Event]:
    async with AsyncClient(addresses, resume_timeout_s=resume_timeout_s, retry_overload=retry_overload) as client:
        return [event async for event in client.generate_stream("hello", timeout=timeout, **_options(options))]


def _options(options: dict[str, object]) -> GenerateOptions:
    return options  # type: ignore[return-value]


@pytest.fixture(params=[collect_sync, collect_async], ids=["sync", "async"])
def collect(request: pytest.FixtureRequest) -> Collect:
    function: Collect = request.param
    return function


def check_whole(events: list[Event], num_choices: int = 1) -> None:
    """Started once, every index and its text once and in order, Completed once."""
    assert isinstance(events[0], Started) and isinstance(events[-1], Completed)
    deltas = [event for event in events if isinstance(event, Delta)]
    assert len(deltas) == len(events) - 2
    for choice in range(num_choices):
        mine = [event for event in deltas if event.choice == choice]
        assert [index for event in mine for index in range(event.first_index, event.first_index + len(event.token_ids))] == list(
            range(NUM_TOKENS)
        )
        assert [t for event in mine for t in event.token_ids] == [token(choice, index) for index in range(NUM_TOKENS)]
        assert "".join(event.text for event in mine) == "".join(text(choice, index) for index in range(NUM_TOKENS))
        assert mine[-1].finish_reason is FinishReason.LENGTH


async def test_stream_of_typed_events(routers: Routers, collect: Collect) -> None:
    router = await routers()
    events = await collect([router.address], temperature=0.0, mode="remote", stop=["x"], request_id="mine", seed=3)
    check_whole(events)
    assert events[0] == Started("mine", SEED, "fake", 0)
    assert isinstance(events[-1], Completed)
    assert events[-1].timings.mode is PrefillMode.REMOTE
    assert sum(events[-1].timings.ttft_parts.values()) == events[-1].timings.ttft_ns == 10
    assert events[-1].num_resumes == 0
    sent = router.script.requests[0]
    assert sent.sampling.HasField("temperature") and sent.sampling.temperature == 0
    assert (list(sent.sampling.stop), sent.sampling.seed, sent.options.mode) == (["x"], 3, mesh_pb2.PREFILL_MODE_REMOTE)


@pytest.mark.parametrize("num_choices", [1, 3])
async def test_lost_router_resumes_at_the_next(routers: Routers, collect: Collect, num_choices: int) -> None:
    first = await routers(Script(fail_after=5, failure=errors.Unavailable("gone")))
    second = await routers()
    check_whole(events := await collect([first.address, second.address], n=num_choices), num_choices)
    resume = second.script.requests[0].resume
    assert resume.seed == SEED and resume.system_fingerprint == FINGERPRINT
    assert sum(len(choice.token_ids) for choice in resume.emitted) == 5
    assert all(list(c.token_ids) == [token(c.index, i) for i in range(len(c.token_ids))] for c in resume.emitted)
    assert isinstance(events[-1], Completed) and events[-1].num_resumes == 1
    assert second.script.requests[0].options.request_id == "made-up-r1"


async def test_same_router_is_tried_again(routers: Routers, collect: Collect) -> None:
    router = await routers(Script(fail_after=3, failure=errors.Unavailable("restarting"), num_failures=2))
    check_whole(await collect([router.address]))
    assert [len(request.resume.emitted) for request in router.script.requests] == [0, 1, 1]
    assert [len(choice.token_ids) for choice in router.script.requests[2].resume.emitted] == [6]


async def test_finished_choice_is_named_and_not_repeated(routers: Routers, collect: Collect) -> None:
    lost = Script(fail_after=NUM_TOKENS, failure=errors.Unavailable("gone just before the end"))
    first, second = await routers(lost), await routers()
    check_whole(await collect([first.address, second.address]))
    assert second.script.requests[0].resume.emitted[0].finish_reason == common_pb2.FINISH_REASON_LENGTH


async def test_stream_that_just_ends_is_resumed(routers: Routers, collect: Collect) -> None:
    started = mesh_pb2.GenerateResponse(started=mesh_pb2.Started(request_id="a", seed=SEED))
    first = await routers(Script(messages=[started, mesh_pb2.GenerateResponse(delta=delta(0, 0))]))
    second = await routers()
    check_whole(await collect([first.address, second.address]))


async def test_unreachable_address_is_passed_over(routers: Routers, collect: Collect) -> None:
    dead = await start_router()
    await dead.stop()
    alive = await routers()
    check_whole(await collect([dead.address, alive.address]))
    assert not alive.script.requests[0].HasField("resume")


async def test_no_router_at_all_ends_after_the_resume_timeout(collect: Collect) -> None:
    dead = await start_router()
    await dead.stop()
    began = time.monotonic()
    with pytest.raises(errors.Unavailable):
        await collect([dead.address], resume_timeout_s=0.3)
    assert time.monotonic() - began < 5


async def test_repeated_indexes_are_dropped_and_gaps_are_errors(routers: Routers, collect: Collect) -> None:
    started = mesh_pb2.GenerateResponse(started=mesh_pb2.Started(request_id="a", seed=SEED))
    first, second = (mesh_pb2.GenerateResponse(delta=delta(0, index)) for index in range(2))
    fourth = mesh_pb2.GenerateResponse(delta=delta(0, 3))
    done = mesh_pb2.GenerateResponse(completed=mesh_pb2.Completed())
    repeated = await routers(Script(messages=[started, first, first, second, done]))
    assert [event.first_index for event in await collect([repeated.address]) if isinstance(event, Delta)] == [0, 1]
    gap = await routers(Script(messages=[started, first, second, fourth, done]))
    with pytest.raises(errors.Internal, match="indexes 3 to 3 where 2 is next"):
        await collect([gap.address])


async def test_invalid_argument_names_the_field(routers: Routers, collect: Collect) -> None:
    failure = errors.InvalidArgument("sampling.top_p", "sampling.top_p is 2; give a number in (0, 1]")
    router = await routers(Script(failure=failure))
    with pytest.raises(errors.InvalidArgument, match="top_p is 2") as caught:
        await collect([router.address])
    assert caught.value.field == "sampling.top_p"
    assert len(router.script.requests) == 1


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"seed": -1}, "seed"),
        ({"mode": "sideways"}, "mode"),
        ({"temprature": 1.0}, "temprature"),
        ({"stop": [3]}, "stop"),
        ({"json_schema": 3}, "json_schema"),
        ({"choice": "yes"}, "choice"),
        ({"regex": "a", "grammar": "b"}, "grammar"),
    ],
)
async def test_what_cannot_be_sent_is_an_invalid_argument(collect: Collect, options: dict[str, object], field: str) -> None:
    with pytest.raises(errors.InvalidArgument) as caught:
        await collect(["127.0.0.1:1"], **options)
    assert caught.value.field == field


async def test_overload_is_an_error_with_its_delay(routers: Routers, collect: Collect) -> None:
    router = await routers(Script(failure=errors.Overloaded("full", retry_delay_s=0.25)))
    with pytest.raises(errors.Overloaded) as caught:
        await collect([router.address])
    assert caught.value.retry_delay_s == pytest.approx(0.25)
    assert len(router.script.requests) == 1


async def test_overload_is_waited_out_when_asked(routers: Routers, collect: Collect) -> None:
    router = await routers(Script(failure=errors.Overloaded("full", retry_delay_s=0.1), num_failures=2))
    began = time.monotonic()
    check_whole(await collect([router.address], retry_overload=True))
    assert time.monotonic() - began >= 0.2
    assert [request.options.attempt for request in router.script.requests] == [0, 1, 2], "what is tried again says so"


async def test_a_caller_that_tries_again_itself_is_believed(routers: Routers, collect: Collect) -> None:
    router = await routers(Script(failure=errors.Overloaded("full", retry_delay_s=0.01)))
    check_whole(await collect([router.address], retry_overload=True, attempt=3))
    assert [request.options.attempt for request in router.script.requests] == [3, 4]


async def test_a_refused_resume_is_waited_out(routers: Routers, collect: Collect) -> None:
    first = await routers(Script(fail_after=2, failure=errors.Unavailable("gone"), num_failures=99))
    second = await routers(Script(failure=errors.Overloaded("full", retry_delay_s=0.05)))
    check_whole(await collect([first.address, second.address]))


async def test_deadline_goes_with_the_call(routers: Routers, collect: Collect) -> None:
    router = await routers(Script(hang_after=2))
    began = time.monotonic()
    with pytest.raises(errors.DeadlineExceeded):
        await collect([router.address], timeout=0.4)
    assert 0.3 < time.monotonic() - began < 5
    await asyncio.wait_for(router.script.cancelled.wait(), 5)


async def test_deadline_bounds_the_search_for_a_router(collect: Collect) -> None:
    dead = await start_router()
    await dead.stop()
    with pytest.raises(errors.DeadlineExceeded):
        await collect([dead.address], timeout=0.3, resume_timeout_s=30.0)


async def test_later_attempts_have_the_time_that_is_left(routers: Routers, collect: Collect) -> None:
    failure = errors.Overloaded("full", retry_delay_s=0.3)
    router = await routers(Script(failure=failure))
    check_whole(await collect([router.address], timeout=5.0, retry_overload=True))
    first, second = router.script.time_left_s
    assert first is not None and second is not None and second <= first - 0.25


async def test_closing_the_async_iterator_cancels(routers: Routers) -> None:
    router = await routers(Script(hang_after=3))
    async with AsyncClient(router.address) as client:
        async with client.generate_stream("hello") as stream:
            async for event in stream:
                if isinstance(event, Delta) and event.first_index == 1:
                    break
        await asyncio.wait_for(router.script.cancelled.wait(), 5)
        assert [event async for event in stream] == []


async def test_cancelled_task_cancels_the_request(routers: Routers) -> None:
    router = await routers(Script(hang_after=0))
    async with AsyncClient(router.address) as client:
        stream = client.generate_stream("hello")
        await anext(stream)
        waiting = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await asyncio.wait_for(router.script.cancelled.wait(), 5)


async def test_cancel_wakes_the_async_reader(routers: Routers) -> None:
    router = await routers(Script(hang_after=0))
    async with AsyncClient(router.address) as client:
        stream = client.generate_stream("hello")
        await anext(stream)
        waiting = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        stream.cancel()
        with pytest.raises(errors.Cancelled):
            await waiting


async def test_closing_the_sync_iterator_cancels(routers: Routers) -> None:
    router = await routers(Script(hang_after=3))

    def read_two() -> list[Event]:
        with Client(router.address) as client, client.generate_stream("hello") as stream:
            return [next(stream), next(stream)]

    assert len(await asyncio.to_thread(read_two)) == 2
    await asyncio.wait_for(router.script.cancelled.wait(), 5)


async def test_cancel_wakes_the_sync_reader(routers: Routers) -> None:
    router = await routers(Script(hang_after=0))
    with Client(router.address) as client:
        stream = await asyncio.to_thread(client.generate_stream, "hello")
        await asyncio.to_thread(next, stream)
        waiting = asyncio.ensure_future(asyncio.to_thread(list, stream))
        await asyncio.sleep(0)
        stream.cancel()
        with pytest.raises(errors.Cancelled):
            await waiting


async def test_closing_the_client_wakes_its_readers(routers: Routers) -> None:
    router = await routers(Script(hang_after=0))
    client = Client(router.address)
    stream = await asyncio.to_thread(client.generate_stream, "hello")
    await asyncio.to_thread(next, stream)
    waiting = asyncio.ensure_future(asyncio.to_thread(list, stream))
    await asyncio.sleep(0.1)
    client.close()
    with pytest.raises(errors.Cancelled):
        await asyncio.wait_for(waiting, 10)


async def test_whole_answers_and_unary_calls(routers: Routers) -> None:
    router = await routers(Script(fail_after=4, failure=errors.Unavailable("gone")))
    async with AsyncClient([router.address]) as client:
        answer = await client.chat([("user", "hi"), Message("assistant", "yes"), {"role": "user", "content": "go on"}], n=2)
        assert [len(choice.token_ids) for choice in answer.choices] == [NUM_TOKENS, NUM_TOKENS]
        assert answer.text.startswith("<0.0><0.1>") and answer.num_resumes == 1
        assert (await client.tokenize("ab")).token_ids == (97, 98)
        assert (await client.list_models())[0].name == "fake"
        assert (await client.status()).router_id == "fake-router"

    def in_thread() -> None:
        with Client(router.address) as sync_client:
            assert sync_client.generate([1, 2, 3]).text == answer.text
            assert sync_client.chat([("user", "hi")]).token_ids == answer.token_ids
            assert sync_client.tokenize("ab", timeout=5).max_context == 64
            assert sync_client.list_models()[0].num_decode_workers == 2
            assert sync_client.status().max_inflight == 4

    await asyncio.to_thread(in_thread)


async def test_unary_call_moves_on_to_the_next_router(routers: Routers) -> None:
    first, second = await routers(Script(failure=errors.Unavailable("gone"), num_failures=99)), await routers()
    async with AsyncClient([first.address, second.address]) as client:
        assert (await client.tokenize("ab")).token_ids == (97, 98)
        assert client.routers == (first.address, second.address)


@pytest.mark.parametrize("fail_after", [0, 5])
async def test_a_cancel_that_nobody_asked_for_is_a_lost_router(routers: Routers, collect: Collect, fail_after: int) -> None:
    router = await routers(Script(fail_after=fail_after, failure=errors.Cancelled("the server stops")))
    check_whole(await collect([router.address]))
    assert len(router.script.requests) == 2
    assert sum(len(choice.token_ids) for choice in router.script.requests[1].resume.emitted) == fail_after


async def test_who_is_cancelled_for_ever_gives_up(routers: Routers, collect: Collect) -> None:
    router = await routers(Script(fail_after=0, failure=errors.Cancelled("no"), num_failures=1000))
    with pytest.raises(errors.Unavailable, match="cancelled the call: no"):
        await collect([router.address], resume_timeout_s=0.3)


async def test_plain_calls_survive_a_cancel_that_nobody_asked_for(routers: Routers) -> None:
    failure = errors.Cancelled("the server stops")
    first, second = await routers(Script(failure=failure)), await routers(Script(failure=failure))
    async with AsyncClient(first.address) as client:
        assert (await client.tokenize("ab")).token_ids == (97, 98)

    def tokenize() -> tuple[int, ...]:
        with Client(second.address) as client:
            return client.tokenize("ab").token_ids

    assert await asyncio.to_thread(tokenize) == (97, 98)


async def test_closing_the_client_ends_its_streams_for_good(routers: Routers) -> None:
    router = await routers(Script(hang_after=2))
    client = Client(router.address)

    def read() -> None:
        for _ in client.generate_stream("hello"):
            pass

    reading = asyncio.create_task(asyncio.to_thread(read))
    await eventually(lambda: router.script.requests)
    await asyncio.sleep(0.05)
    client.close()
    with pytest.raises(errors.Cancelled):
        await asyncio.wait_for(reading, 5)
    assert len(router.script.requests) == 1


async def test_a_session_is_released(routers: Routers) -> None:
    router = await routers()

    def released() -> ReleasedSession:
        with Client(router.address) as client:
            return client.release_session("s", tenant="t", model="m")

    assert await asyncio.to_thread(released) == ReleasedSession(num_blocks=7, num_workers=2, num_unreachable=1)
    async with AsyncClient(router.address) as client:
        assert (await client.release_session("s")).num_blocks == 7
    asked = [(request.session_id, request.tenant, request.model) for request in router.script.released]
    assert asked == [("s", "t", "m"), ("s", "", "")]


async def test_the_options_of_a_session_are_sent(routers: Routers, collect: Collect) -> None:
    router = await routers()
    await collect([router.address], session_id="s", kv_retention_s=5, session_final=True, priority_hint=-7)
    options = router.script.requests[0].options
    assert (options.session_id, options.kv_retention_s, options.session_final, options.priority_hint) == ("s", 5, True, -7)
