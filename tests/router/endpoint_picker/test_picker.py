"""Endpoints and the choice among them."""

import asyncio
from collections.abc import Sequence

import pytest

from pdmesh.planning.latency_model import LatencyModel
from pdmesh.runtime.errors import ResourceExhausted, Unavailable
from router.endpoint_picker.config import PickerConfig
from router.endpoint_picker.endpoints import Endpoints
from router.endpoint_picker.picker import Asked, Pick, Picker, _Placing
from router.endpoint_picker.prompts import Prompt, block_names
from router.endpoint_picker.server_metrics import ServerLoad
from router.flow_control.slo_admission import BATCH, INTERACTIVE

A, B, C = "10.0.0.1:8000", "10.0.0.2:8000", "10.0.0.3:8000"
SPEED = LatencyModel(5e-3, 2e-4, 1e-8, 3e-4, 1e-7)
IDLE = ServerLoad(block_size=16, num_blocks=4096, speed=SPEED)


def picker_of(addresses: Sequence[str] = (A, B, C), load: ServerLoad | None = IDLE, **settings: object) -> Picker:
    config = PickerConfig(endpoints=tuple(addresses), **settings)  # type: ignore[arg-type]
    config.validate()
    endpoints = Endpoints(max_num_seqs=config.max_num_seqs, max_failures=3, index_blocks=1 << 16, tokens_per_block=16)
    endpoints.found(addresses)
    for address in addresses:
        endpoints.read(address, load, 1.0, 1.0)
    return Picker(config, endpoints)


def prompt(text: str, num_tokens: int = 0) -> Prompt:
    return Prompt("m", block_names(text.encode(), b"", 64), num_tokens or len(text) // 4, 16.0, 32)


def assert_empty(picker: Picker) -> None:
    assert picker.flow.admission.num_inflight == 0
    assert picker.flow.admission.num_queued == 0
    assert all(not endpoint.sent for endpoint in picker.endpoints.all())
    assert all(estimate.dispatched_seqs == 0 for estimate in picker.endpoints.fleet.views())


async def test_an_endpoint_with_the_prefix_is_picked() -> None:
    picker = picker_of()
    long = "a word and another one " * 400
    first = await picker.pick(Asked(prompt(long)))
    first.end()
    for number in range(5):
        pick = await picker.pick(Asked(prompt(long + f"turn {number} " * 30)))
        assert pick.addresses[0] == first.addresses[0]
        assert pick.cached_tokens > 2000
        pick.end()
    assert_empty(picker)


async def test_a_wait_for_a_cached_prefix_stops_none_that_could_begin_elsewhere() -> None:
    picker, long, only = picker_of([A, B]), "a word and another one " * 3500, frozenset((A,))
    first = await picker.pick(Asked(prompt(long), subset=only))
    first.answered()
    first.end()
    other = await picker.pick(Asked(prompt("something else " * 1100), subset=only))  # nearly a second of work
    forecast = _Placing(picker._place, Asked(prompt(long))).forecast()
    assert forecast is not None and forecast.ahead_s > 0.5
    assert forecast.elsewhere is not None and forecast.elsewhere.ahead_s == 0
    unknown = _Placing(picker._place, Asked(prompt("z" * len(long)))).forecast()
    assert unknown is not None and unknown.ahead_s == 0 and unknown.elsewhere is None
    other.end()
    assert_empty(picker)


async def test_requests_at_the_same_time_are_spread() -> None:
    picker = picker_of()
    picks = [await picker.pick(Asked(prompt(f"{number} " * 500))) for number in range(6)]
    assert sorted(pick.addresses[0] for pick in picks) == [A, A, B, B, C, C]
    assert all(len(set(pick.addresses)) == 3 for pick in picks), "two fallbacks each"
    for pick in picks:
        pick.end()
        pick.end()
    assert_empty(picker)


async def test_the_load_that_others_make_is_seen() -> None:
    picker = picker_of()
    busy = ServerLoad(num_running=40, num_waiting=20, used=0.9, block_size=16, num_blocks=4096, speed=SPEED)
    picker.endpoints.read(A, busy, 2.0, 2.0)
    picker.endpoints.read(B, busy, 2.0, 2.0)
    pick = await picker.pick(Asked(prompt("hello " * 100)))
    assert pick.addresses[0] == C
    pick.end()


async def test_a_reading_does_not_count_a_request_twice() -> None:
    picker = picker_of([A])
    pick = await picker.pick(Asked(prompt("x" * 4000)))
    (view,) = picker.endpoints.fleet.views()
    assert (view.num_seqs, view.dispatched_seqs, view.dispatched_tokens) == (0, 1, 1000)
    late = picker.endpoints.get(A)
    assert late is not None
    now = next(iter(late.sent)).at + 1
    picker.endpoints.read(A, ServerLoad(num_running=1, used=0.1, num_blocks=4096, speed=SPEED), now, now)
    (view,) = picker.endpoints.fleet.views()
    assert (view.num_seqs, view.dispatched_seqs, view.dispatched_tokens) == (1, 0, 0)
    pick.end()
    (view,) = picker.endpoints.fleet.views()
    assert view.num_seqs + view.dispatched_seqs == 0
    picker.endpoints.read(A, IDLE, now + 1, now + 1)
    assert_empty(picker)


async def test_only_endpoints_of_the_subset_are_picked() -> None:
    picker = picker_of()
    for _ in range(4):
        pick = await picker.pick(Asked(prompt("hello"), subset=frozenset((B, "10.9.9.9:1"))))
        assert pick.addresses == (B,)
        pick.end()
    with pytest.raises(Unavailable, match="0 of the 1 endpoints that the gateway allows"):
        await picker.pick(Asked(prompt("hello"), subset=frozenset(("10.9.9.9:1",))))
    with pytest.raises(Unavailable):
        await picker.pick(Asked(prompt("hello"), subset=frozenset()))
    assert_empty(picker)


async def test_an_endpoint_that_does_not_answer_gets_nothing() -> None:
    picker = picker_of([A, B])
    assert [picker.endpoints.failed(A) for _ in range(4)] == [False, False, True, False]
    for _ in range(3):
        (await picker.pick(Asked(prompt("hello")))).end()
    assert picker.endpoints.num_ready == 1
    for _ in range(3):
        picker.endpoints.failed(B)
    with pytest.raises(Unavailable, match="0 of the pool's 2 endpoints are ready"):
        await picker.pick(Asked(prompt("hello")))
    picker.endpoints.read(A, IDLE, 2.0, 2.0)
    assert (await picker.pick(Asked(prompt("hello")))).addresses == (A,)


def test_of_an_endpoint_that_never_answered_is_said_so_once() -> None:
    """Its metrics may be behind TLS, a key or a policy: the pool would be short of it without a word."""
    endpoints = Endpoints(max_num_seqs=256, max_failures=3, index_blocks=1000, tokens_per_block=64)
    endpoints.found([A])
    assert [endpoints.failed(A) for _ in range(5)] == [False, False, True, False, False]


async def test_an_endpoint_that_is_gone_takes_its_requests_along() -> None:
    picker = picker_of([A, B])
    picks = [await picker.pick(Asked(prompt("hello " * 400))) for _ in range(4)]
    picker.endpoints.found([B])
    picker.endpoints.found([A, B])
    assert picker.endpoints.num_ready == 1, "what came back is not ready before its first reading"
    for pick in picks:
        pick.answered()
        pick.end()
    assert_empty(picker)


async def test_an_endpoint_that_came_back_has_no_prefixes() -> None:
    picker = picker_of([A])
    (await picker.pick(Asked(prompt("hello " * 400)))).end()
    assert len(picker.endpoints.blocks) > 0
    picker.endpoints.found([])
    assert len(picker.endpoints.blocks) == 0


async def test_blocks_beyond_the_cache_are_forgotten() -> None:
    small = ServerLoad(block_size=16, num_blocks=64, speed=SPEED)
    picker = picker_of([A], small)
    for number in range(40):
        pick = await picker.pick(Asked(prompt(f"{number:04} " * 160)))
        pick.end()
    assert len(picker.endpoints.blocks) <= 64


async def test_a_fallback_that_served_is_counted() -> None:
    picker = picker_of([A, B])
    pick = await picker.pick(Asked(prompt("hello " * 400)))
    other = pick.addresses[1]
    pick.answered(other)
    counts = {endpoint.address: len(endpoint.sent) for endpoint in picker.endpoints.all()}
    assert counts == {pick.addresses[0]: 0, other: 1}
    pick.end()
    assert_empty(picker)


async def test_a_served_address_of_nowhere_is_harmless() -> None:
    picker = picker_of([A])
    pick = await picker.pick(Asked(prompt("hello")))
    pick.answered("nonsense")
    pick.end()
    assert_empty(picker)


async def test_a_full_picker_refuses_batch_first_and_leaks_nothing() -> None:
    picker = picker_of([A], max_inflight=2, max_queued=8)
    held = [await picker.pick(Asked(prompt("x"), priority=INTERACTIVE)) for _ in range(2)]
    waiting = [asyncio.create_task(picker.pick(Asked(prompt("x"), priority=BATCH))) for _ in range(8)]
    await asyncio.sleep(0)
    urgent = [asyncio.create_task(picker.pick(Asked(prompt("x"), priority=INTERACTIVE))) for _ in range(8)]
    await asyncio.sleep(0.01)
    refused = [task for task in (*waiting, *urgent) if task.done()]
    assert refused
    assert all(isinstance(task.exception(), ResourceExhausted) for task in refused)
    assert len([task for task in refused if task in waiting]) > len([task for task in refused if task in urgent])
    cancelled = next(task for task in urgent if not task.done())
    cancelled.cancel()
    left = [task for task in (*waiting, *urgent) if not task.done() and task is not cancelled]

    async def finish(task: asyncio.Task[Pick]) -> None:
        (await task).end()

    for pick in held:
        pick.end()
    await asyncio.gather(*map(finish, left))
    await asyncio.gather(cancelled, return_exceptions=True)
    assert_empty(picker)


@pytest.mark.parametrize("policy", ["predict", "round-robin", "least-loaded", "prefix"])
async def test_every_policy_picks(policy: str) -> None:
    picker = picker_of(policy=policy)
    picks = [await picker.pick(Asked(prompt(f"{number} " * 500))) for number in range(3)]
    assert len({pick.addresses[0] for pick in picks}) == (1 if policy == "prefix" else 3), "it looks at nothing but prefixes"
    assert all(len(set(pick.addresses)) == 3 for pick in picks)
    for pick in picks:
        pick.end()
    assert_empty(picker)


async def test_without_metrics_own_requests_count() -> None:
    picker = picker_of(load=None)
    picks = [await picker.pick(Asked(prompt(f"{number} " * 500))) for number in range(6)]
    assert sorted(pick.addresses[0] for pick in picks) == [A, A, B, B, C, C]
    for pick in picks:
        pick.end()
    assert_empty(picker)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"endpoints": ("host:80",)}, "endpoints"),
        ({"endpoints": ("10.0.0.1:99999",)}, "endpoints"),
        ({"endpoints": (A,), "pool": "a/b"}, "endpoints"),
        ({}, "endpoints"),
        ({"pool": "nameless"}, "pool"),
        ({"endpoints": (A,), "metrics_path": "metrics"}, "metrics_path"),
        ({"endpoints": (A,), "metrics_path": "/a b"}, "metrics_path"),
        ({"endpoints": (A,), "objectives": ("gold",)}, "objectives"),
        ({"endpoints": (A,), "max_queued": -1}, "max_queued"),
        ({"endpoints": (A,), "prefix_block_bytes": 0}, "prefix_block_bytes"),
        ({"endpoints": (A,), "hold_timeout_s": 0.0}, "hold_timeout_s"),
        ({"endpoints": (A,), "port": 70000}, "port"),
    ],
)
def test_wrong_settings_are_named(settings: dict[str, object], named: str) -> None:
    with pytest.raises(ValueError, match=f"^{named}: "):
        PickerConfig(**settings).validate()  # type: ignore[arg-type]


def test_priorities_of_objectives() -> None:
    config = PickerConfig(endpoints=(A,), objectives=("gold=10", "plain=0", "sheddable=-1"))
    config.validate()
    assert config.priorities() == {"gold": 1, "plain": 2, "sheddable": 3}
