"""Prefix memory, outbox, silence, room line, objectives, timings, configuration."""

import asyncio
import contextlib
import json
import re
from pathlib import Path

import pytest

from pdmesh.planning import objectives
from pdmesh.runtime.config import ConfigError, parse
from pdmesh.runtime.errors import ResourceExhausted, Unavailable
from pdmesh.v1 import common_pb2, mesh_pb2
from router.config import RouterConfig
from router.fleet.change_notifier import ChangeNotifier, Signal, unless, wait_at_most
from router.fleet.heartbeat import HeartbeatClock
from router.lifecycle.capacity_queue import CapacityQueue
from router.lifecycle.output import ClientStream, TokenChunk
from router.telemetry.timings import RequestTimings, now_ns
from router.tokenization.prepared_request import scoped_salt

LENGTH = common_pb2.FINISH_REASON_LENGTH
A, B = ("a:1", 1), ("b:1", 2)


def itself(span: TokenChunk) -> TokenChunk:
    """Renders nothing."""
    return span


async def test_outbox_merges_what_piles_up() -> None:
    client_stream = ClientStream(100, itself)
    for span in (
        TokenChunk(0, 0, [1]),
        TokenChunk(0, 1, [2]),
        TokenChunk(1, 0, [9]),
        TokenChunk(0, 2, [3]),
        TokenChunk(0, 3, [4], finish_reason=LENGTH),
    ):
        client_stream.put(span)
    taken = [(span.choice, span.first_index, span.token_ids, span.finish_reason) for span in await client_stream.take()]
    assert taken == [(0, 0, [1, 2], 0), (1, 0, [9], 0), (0, 2, [3, 4], 2)]


async def test_outbox_overflow_drops_everything_and_says_why() -> None:
    client_stream = ClientStream(3, itself)
    client_stream.put(TokenChunk(0, 0, [1, 2, 3]))
    assert not client_stream.failed
    client_stream.put(TokenChunk(0, 3, [4]))
    with pytest.raises(ResourceExhausted, match="too slowly"):
        await client_stream.take()


async def test_outbox_gives_what_it_has_before_the_error() -> None:
    client_stream = ClientStream(3, itself)
    client_stream.put(TokenChunk(0, 0, [1]))
    client_stream.fail(Unavailable("going"))
    client_stream.fail(ResourceExhausted("later"))
    assert (await client_stream.take())[0].token_ids == [1]
    with pytest.raises(Unavailable):
        await client_stream.take()


def test_silence_does_not_count_own_stalls() -> None:
    clock = HeartbeatClock(timeout_s=1.0, tick_s=0.1)
    assert not clock.tick(0.0)
    assert not clock.tick(60.0)  # this process was stopped for a minute
    assert not any(clock.tick(60.0 + number / 10) for number in range(1, 8))
    assert any(clock.tick(61.0 + number / 10) for number in range(4))


def test_silence_ends_with_every_word() -> None:
    clock = HeartbeatClock(timeout_s=1.0, tick_s=0.1)
    for number in range(100):
        assert not clock.tick(number / 10)
        clock.heard()


def test_room_line_serves_by_priority_then_arrival() -> None:
    line = CapacityQueue()
    assert line.is_empty("m")
    first, second, urgent = line.enter("m", 2), line.enter("m", 2), line.enter("m", 1)
    assert [turn.may_try.is_set() for turn in (first, second, urgent)] == [False, False, True]
    line.leave("m", urgent)
    assert [turn.may_try.is_set() for turn in (first, second)] == [True, False]
    line.leave("m", first)
    assert second.may_try.is_set() and line.is_empty("other")
    line.leave("m", second)
    assert line.is_empty("m")


def test_in_the_room_line_a_priority_passes_its_own_tenant_only_and_who_was_interrupted_everybody() -> None:
    line = CapacityQueue()
    own, other, urgent = line.enter("m", 2, "a"), line.enter("m", 2, "b"), line.enter("m", 1, "a")
    lost = line.enter("m", 3, "c", interrupted=True)
    order = []
    for _ in range(4):
        (turn,) = [turn for turn in (own, other, urgent, lost) if turn.may_try.is_set() and turn not in order]
        order.append(turn)
        line.leave("m", turn)
    assert order == [lost, urgent, other, own]


def test_in_the_room_line_more_may_try_with_each_success_of_the_first_and_one_after_a_failure() -> None:
    line = CapacityQueue()
    dispatch_order = [line.enter("m", 2, "a") for _ in range(9)]
    allowed = []
    for place, turn in enumerate(dispatch_order[:3], 1):
        line.leave("m", turn, placed=True)
        allowed.append(sum(other.may_try.is_set() for other in dispatch_order[place:]))
    assert allowed == [2, 4, 6]  # there are no more than six left
    late = line.enter("m", 2, "b")
    assert late.may_try.is_set()  # the eighth of eight that may
    line.failed("m")
    assert [turn.may_try.is_set() for turn in (*dispatch_order[3:], late)] == [True] + 6 * [False]
    line.leave("m", dispatch_order[5], placed=True)  # its try was under way; the first has still found nothing
    assert [turn.may_try.is_set() for turn in (dispatch_order[3], dispatch_order[4])] == [True, False]
    line.leave("m", dispatch_order[3], placed=False)  # its client has left
    assert [turn.may_try.is_set() for turn in (dispatch_order[4], dispatch_order[6])] == [True, False]


async def test_changes_are_not_missed() -> None:
    changes = ChangeNotifier()
    change = changes.next
    changes.fire()
    assert await wait_at_most(change, 1.0)
    assert not await wait_at_most(changes.next, 0.001)


async def test_unless() -> None:
    event, started, cancelled = Signal(), asyncio.Event(), asyncio.Event()

    async def quick() -> int:
        return 7

    async def endless() -> int:
        try:
            started.set()
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise
        return 8

    assert await unless(event, quick()) == 7
    waiting = asyncio.create_task(unless(event, endless()))
    await started.wait()
    event.set()
    assert await waiting is None
    assert cancelled.is_set()
    assert waiting.cancelling() == 0
    assert await unless(event, endless()) is None


@pytest.mark.parametrize("signal_too", [False, True])
async def test_unless_is_cancelled_from_outside(signal_too: bool) -> None:
    signal, started = Signal(), asyncio.Event()

    async def endless() -> None:
        started.set()
        await asyncio.Event().wait()

    waiting = asyncio.create_task(unless(signal, endless()))
    await started.wait()
    if signal_too:
        signal.set()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting


async def test_unless_leaves_no_cancellation_behind() -> None:
    signal, started = Signal(), asyncio.Event()

    async def stubborn() -> int:
        started.set()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        return 7

    waiting = asyncio.create_task(unless(signal, stubborn()))
    await started.wait()
    signal.set()
    assert await waiting == 7
    assert waiting.cancelling() == 0


def test_objectives(tmp_path: Path) -> None:
    toml, js = tmp_path / "o.toml", tmp_path / "o.json"
    toml.write_text("[m]\nttft_ms = 500\ntpot_ms = 40\n")
    js.write_text(json.dumps({"m": {"ttft_ms": 500, "tpot_ms": 40, "quantile": 0.99}}))
    assert objectives.load(str(toml)) == objectives.load(str(js))
    assert objectives.load("") == ()


def test_objectives_of_priorities(tmp_path: Path) -> None:
    path = tmp_path / "o.toml"
    path.write_text("[m]\nttft_ms = 500\ntpot_ms = 40\n[m.interactive]\nttft_ms = 300\n[m.batch]\ntpot_ms = 200\n")
    (goal,) = objectives.load(str(path))
    assert goal.bounds(common_pb2.PRIORITY_INTERACTIVE) == objectives.Bounds(300, 40)
    assert goal.bounds(common_pb2.PRIORITY_STANDARD) == objectives.Bounds(500, 40)
    assert goal.bounds(common_pb2.PRIORITY_BATCH) == objectives.Bounds(None, 200)
    path.write_text("[m]\nttft_ms = 500\ntpot_ms = 40\n")
    assert objectives.load(str(path))[0].bounds(common_pb2.PRIORITY_BATCH) == objectives.Bounds(None, None)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[m]\nttft_ms = 5\ntpot_ms = 4\n[m.batch]\nttft_ms = 0", "m.batch.ttft_ms"),
        ("[m]\nttft_ms = 5\ntpot_ms = 4\n[m.batch]\nquantile = 0.5", "m.batch: unknown field 'quantile'"),
        ("[m]\nttft_ms = 5\ntpot_ms = 4\ninteractive = 3", "m.interactive: must be a table"),
        ("[m]\nttft_ms = 0\ntpot_ms = 40", "m.ttft_ms"),
        ("[m]\nttft_ms = 500", "m.tpot_ms"),
        ("[m]\nttft_ms = 500\ntpot_ms = 40\nquantile = 1.0", "m.quantile"),
        (
            "[m]\nttft_ms = 500\ntpot_ms = 40\nttft = 1",
            "unknown field 'ttft'; known are ttft_ms, tpot_ms, quantile, interactive",
        ),
        ("m = 3", "must be a table"),
        ("[m", "o.toml"),
    ],
)
def test_wrong_objectives(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "o.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as wrong:
        objectives.load(str(path))
    assert words in str(wrong.value)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ([], "--models"),
        (["--models", "x"], "--models"),
        (["--models", "x=a,x=b"], "named twice"),
        (["--models", "x=a", "--max-inflight", "0"], "--max-inflight"),
        (["--models", "x=a", "--stream-timeout-s", "0.1"], "--stream-timeout-s"),
        (["--models", "x=a", "--port", "70000"], "--port"),
        (["--models", "x=a", "--heartbeat-ms", "5"], "--heartbeat-ms"),
        (["--models", "x=a", "--router-id", "a b"], "--router-id"),
        (["--models", "x=a", "--workers", "here"], "--workers"),
    ],
)
def test_wrong_configuration(flags: list[str], words: str) -> None:
    with pytest.raises(ConfigError) as wrong:
        parse(RouterConfig, flags, {}, prog="router")
    assert words in str(wrong.value)


def test_configuration() -> None:
    config = parse(RouterConfig, ["--models", "x=a,y=b", "--workers", "h:1,h:2"], {"PDMESH_MAX_INFLIGHT": "3"}, prog="router")
    assert (config.model_folders(), config.workers, config.max_inflight) == ({"x": "a", "y": "b"}, ("h:1", "h:2"), 3)


def test_salts_keep_tenants_apart() -> None:
    salts = [scoped_salt(*pair) for pair in (("", ""), ("a", ""), ("", "a"), ("a", "a"), ("1:a", ""), ("", "1:a"), ("a", ":"))]
    assert len(set(salts)) == len(salts)
    assert salts[0] == ""


def _timings(mode: mesh_pb2.PrefillMode.ValueType, submit_ns: int, reserve_ns: int = 0) -> mesh_pb2.Timings:
    timings = RequestTimings(received_ns=now_ns())
    timings.submitting()
    timings.submitted(mode, "d", 0)
    timings.submit_ns = submit_ns
    measured = common_pb2.PrefillTimings(reserve_ns=reserve_ns, prefill_queue_ns=700, prefill_compute_ns=2000, return_ns=30)
    measured.service_ns = 2800 + reserve_ns
    timings.prefilled(measured)
    timings.first_received_ns = timings.call_ns + 3000
    timings.first_handed_ns = timings.first_received_ns + 100
    return timings.message()


def test_remote_parts_are_submit_then_prefill_call() -> None:
    parts = _timings(mesh_pb2.PREFILL_MODE_REMOTE, 500)
    assert (parts.reserve_ns, parts.prefill_queue_ns, parts.prefill_compute_ns, parts.first_token_return_ns) == (
        500,
        700,
        2000,
        330,
    )


def test_a_local_token_may_come_before_its_submit_is_answered() -> None:
    timings = RequestTimings(received_ns=now_ns())
    timings.submitting()
    timings.first_token()
    timings.submitted(mesh_pb2.PREFILL_MODE_LOCAL, "d", 0)
    assert timings.first_local and timings.submit_ns > 0


@pytest.mark.parametrize("submit_ns", [150, 2900])
def test_local_reserve_is_the_workers_whenever_submit_was_answered(submit_ns: int) -> None:
    parts = _timings(mesh_pb2.PREFILL_MODE_LOCAL, submit_ns, reserve_ns=50)
    assert (parts.reserve_ns, parts.prefill_queue_ns, parts.first_token_return_ns) == (50, 700, 280)
    total = parts.reserve_ns + parts.prefill_queue_ns + parts.prefill_compute_ns + parts.first_token_return_ns
    assert total == 3000 + 100 - (2800 - 700 - 2000 - 30)  # all but what the worker itself leaves unexplained


def test_tpot_is_that_of_the_slowest_choice() -> None:
    timings = RequestTimings(received_ns=0)
    assert timings.message().tpot_ns == 0
    timings.handed(0, 1)
    timings.handed(1, 1)
    timings.handed(1, 4)
    timings.paces[1].last_ns = timings.paces[1].first_ns + 400
    assert timings.message().tpot_ns == 100


async def test_outbox_takes_what_comes_at_once_however_much() -> None:
    """A grammar forces it; the client has had no chance to read it."""
    client_stream = ClientStream(3, itself)
    taking = asyncio.create_task(client_stream.take())
    await asyncio.sleep(0)
    for choice in range(5):
        client_stream.put(TokenChunk(choice, 0, [1, 2, 3, 4]))
    assert [span.choice for span in await taking] == [0, 1, 2, 3, 4]
    client_stream.put(TokenChunk(0, 4, [5] * 50))  # nobody waits, and nothing lay there
    assert not client_stream.failed
    client_stream.put(TokenChunk(0, 54, [6]))
    assert client_stream.failed


async def test_outbox_hands_an_error_of_rendering_to_its_own_client() -> None:
    def broken(span: TokenChunk) -> TokenChunk:
        raise RuntimeError("as planned")

    client_stream = ClientStream(3, broken)
    taking = asyncio.create_task(client_stream.take())
    await asyncio.sleep(0)
    client_stream.put(TokenChunk(0, 0, [1]))
    with pytest.raises(RuntimeError, match="as planned"):
        await taking


async def test_outbox_goes_on_waiting_when_a_span_needs_no_message() -> None:
    client_stream = ClientStream(3, lambda span: None if span.first_index == 0 else span)
    taking = asyncio.create_task(client_stream.take())
    await asyncio.sleep(0)
    client_stream.put(TokenChunk(0, 0, [1]))
    await asyncio.sleep(0)
    assert not taking.done()
    client_stream.put(TokenChunk(0, 1, [2]))
    client_stream.put(TokenChunk(0, 2, [3]))
    assert [span.first_index for span in await taking] == [1, 2]


def test_each_model_may_have_its_own_parsers() -> None:
    flags = ["--models", "x=a,y=b", "--tool-parser", "hermes,y=none", "--reasoning-parser", "x=deepseek_r1"]
    config = parse(RouterConfig, flags, {}, prog="router")
    assert (config.parsers_of("x"), config.parsers_of("y")) == (("hermes", "deepseek_r1"), ("none", "auto"))
    assert RouterConfig().parsers_of("x") == ("auto", "auto")


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("hermis", "--tool-parser: 'hermis' is not known; give one of auto, none, harmony"),
        ("x=hermis", "--tool-parser: 'hermis' is not known"),
        ("z=hermes", "--tool-parser: 'z' is none of --models (x, y)"),
        ("hermes,llama", "--tool-parser: two formats for all models"),
        ("x=hermes,x=llama", "--tool-parser: two formats for x"),
    ],
)
def test_a_wrong_parser_is_named(text: str, wrong: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(wrong)):
        parse(RouterConfig, ["--models", "x=a,y=b", "--tool-parser", text], {}, prog="router")


async def test_a_cancellation_that_comes_with_the_event_is_not_lost() -> None:
    """It fails with `asyncio.wait_for` in Python 3.11 only: from 3.12 on that loses no cancellation either."""
    event, ended = asyncio.Event(), list[str]()

    async def forever() -> None:
        while True:
            await wait_at_most(event, 60.0)
            event.clear()

    task = asyncio.create_task(forever())
    task.add_done_callback(lambda _: ended.append("ended"))
    await asyncio.sleep(0)
    for _ in range(3):  # the loops between the event and its waiter: in each of them the cancellation may come
        event.set()
        await asyncio.sleep(0)
    event.set()
    task.cancel()
    await asyncio.wait([task], timeout=5.0)
    assert ended == ["ended"]
