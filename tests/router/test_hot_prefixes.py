"""Which prefixes of the latest prompts are used most."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace
from typing import cast

import pytest

from pdmesh.v1 import common_pb2, worker_pb2
from router.kv_index.hot_prefixes import HALF_LIFE_S, KEPT_S, MAX_PREFIXES, RecentPrompt, RecentPrompts, block_kind, hottest
from router.tokenization.prepared_request import PreparedRequest, ServedModel, SessionState

KIND = "kind"
INFO = worker_pb2.WorkerInfo(
    identity=common_pb2.Identity(model="m", weights_hash="w"), layout=common_pb2.KVLayout(block_size=2, kv_dtype="float32")
)


def prompt(*names: int, at: float = 0.0, tenant: str = "", session_id: str = "") -> RecentPrompt:
    return RecentPrompt("m", (), tenant, "", None, at, session_id, {KIND: names})


def found(prompts: Sequence[RecentPrompt], max_blocks: int = 100, now: float = 0.0) -> list[tuple[int, ...]]:
    return [tuple(prefix.names) for prefix in hottest(prompts, KIND, max_blocks, now)]


def test_what_more_requests_share_comes_first_and_what_one_has_alone_not_at_all() -> None:
    agents = [prompt(1, 2, 3), prompt(1, 2, 4), prompt(1, 2, 4, 5)]
    chats = [prompt(8, 9, 10), prompt(8, 9)]
    assert found([*chats, *agents, prompt(20, 21)]) == [(1, 2), (8, 9), (1, 2, 4)]
    assert found([prompt(1, 2, 3)]) == []
    assert found([]) == []


def test_the_blocks_with_most_uses_are_taken_and_each_behind_its_beginning() -> None:
    prompts = [*[prompt(1, 2, 3, 4)] * 3, *[prompt(7, 8, 9)] * 2]
    assert found(prompts, 3) == [(1, 2, 3)]
    assert found(prompts, 5) == [(1, 2, 3, 4), (7,)]
    assert found(prompts, 0) == []


def test_older_uses_count_less() -> None:
    old, now = [prompt(1, 2, at=0.0)] * 3, 3 * HALF_LIFE_S
    assert found([*old, *[prompt(7, 8, at=0.0)] * 2], now=now) == [(1, 2), (7, 8)]
    assert found([*old, *[prompt(7, 8, at=now)] * 2], now=now) == [(7, 8), (1, 2)]


def test_the_turns_of_one_session_share_nothing() -> None:
    turns = [prompt(1, 2, session_id="s"), prompt(1, 2, 3, session_id="s")]
    assert found(turns) == []
    assert found([*turns, prompt(1, 9, session_id="another")]) == [(1,)]
    assert found([*turns, prompt(1, 9)]) == [(1,)]


def test_a_tenant_has_half_where_another_has_something() -> None:
    greedy = [prompt(*range(100, 200), tenant="a")] * 5
    assert found(greedy, 10) == [tuple(range(100, 110))]
    assert found([*greedy, *[prompt(1, 2, 3, tenant="b")] * 2], 10) == [tuple(range(100, 105)), (1, 2, 3)]
    assert found([*greedy, prompt(1, 2, 3, tenant="b")], 10) == [tuple(range(100, 110))], "the other has nothing worth it"


def test_tenants_take_turns() -> None:
    branches = [prompt(100, 101 + number // 3, tenant="a") for number in range(3 * MAX_PREFIXES)]
    prefixes = found([*branches, *[prompt(1, 2, tenant="b"), prompt(1, 3, tenant="b")] * 2], 10_000)
    assert prefixes[:4] == [(100,), (1,), (100, 101), (1, 2)]
    assert (1, 3) in prefixes and len(prefixes) == MAX_PREFIXES // 2 + 3


def test_prefixes_are_few_however_many_branches_there_are() -> None:
    prompts = [prompt(1, 100 + number // 2) for number in range(4 * MAX_PREFIXES)]
    chosen = found(prompts, 10_000)
    assert len(chosen) == MAX_PREFIXES
    assert chosen[0] == (1,)


@pytest.mark.parametrize("seed", range(20))
def test_no_other_choice_of_as_many_blocks_has_more_uses(seed: int) -> None:
    """Blocks are named by all tokens before them, as their hashes are."""
    draw = random.Random(seed)
    prompts = []
    for _ in range(30):
        tokens = [draw.randrange(2) for _ in range(draw.randrange(1, 7))]
        prompts.append(prompt(*(int("1" + "".join(map(str, tokens[:end])), 2) for end in range(1, len(tokens) + 1))))
    uses = Counter(name for each in prompts for name in each.names[KIND])
    shared = sorted((count for count in uses.values() if count > 1), reverse=True)
    chosen = {name for names in found(prompts, 12) for name in names}
    assert sum(uses[name] for name in chosen) == sum(shared[:12])


def prepared(
    request_id: str, tokens: tuple[int, ...], tenant: str = "", session_id: str = "", state: SessionState | None = None
) -> PreparedRequest:
    model, salt = cast("ServedModel", SimpleNamespace(name="m")), f"of {tenant}"
    return PreparedRequest(
        request_id,
        model,
        tokens,
        common_pb2.SamplingParams(),
        (),
        tenant=tenant,
        cache_salt=salt,
        session_id=session_id,
        session_state=state,
    )


def test_a_request_that_is_sent_twice_counts_once_and_the_next_one_again() -> None:
    recent, kind = RecentPrompts(), block_kind(INFO)
    first, second = prepared("a", (1, 2, 3, 4), "t"), prepared("b", (1, 2, 3, 4), "t")
    for _ in range(2):
        recent.note(first, INFO, [5, 6], 0.0)
    assert recent.hottest(kind, 10, 0.0) == []
    recent.note(second, INFO, [5, 6], 0.0)
    [hot] = recent.hottest(kind, 10, 0.0)
    assert (list(hot.names), hot.weight) == ([5, 6], 2.0)
    told = hot.prompt.token_request(2)
    assert (told.model, list(told.prompt_token_ids), told.tenant, told.cache_salt) == ("m", [1, 2], "t", "of t")
    assert recent.hottest("another kind", 10, 0.0) == []


def test_what_is_kept_is_bounded_in_prompts_and_tokens() -> None:
    few = RecentPrompts(max_prompts=3)
    for number in range(10):
        few.note(prepared(str(number), (1, 2)), INFO, [5], 0.0)
    assert len(few) == 3
    short = RecentPrompts(max_tokens=10)
    for number in range(10):
        short.note(prepared(str(number), (1, 2, 3, 4)), INFO, [5, 6], 0.0)
    assert len(short) == 2
    again = prepared("9", tuple(range(9)))
    short.note(again, INFO, [5, 6], 0.0)
    assert len(short) == 1


def test_a_prompt_is_forgotten_after_a_while_without_use() -> None:
    recent, kind = RecentPrompts(), block_kind(INFO)
    for number in range(3):
        recent.note(prepared(str(number), (1, 2)), INFO, [5], float(number))
    recent.expire(KEPT_S - 0.5)
    assert len(recent) == 3
    recent.note(prepared("3", (1, 2)), INFO, [5], KEPT_S + 0.5)
    assert len(recent) == 3
    assert len(recent.hottest(kind, 10, KEPT_S + 1.5)) == 1
    assert recent.hottest(kind, 10, KEPT_S + 2.5) == []
    recent.expire(2 * KEPT_S + 0.5)
    assert len(recent) == 0


@pytest.mark.parametrize("limits", [{"max_prompts": 8}, {"max_tokens": 16}])
def test_no_tenant_displaces_the_prompts_of_another_that_has_fewer(limits: dict[str, int]) -> None:
    recent, kind = RecentPrompts(**limits), block_kind(INFO)
    for number in range(20):
        recent.note(prepared(f"a{number}", (1, 2), "a"), INFO, [5], 0.0)
    assert len(recent) == 8
    for number in range(2):
        recent.note(prepared(f"b{number}", (3, 4), "b"), INFO, [6], 0.0)
    assert len(recent) == 6, "half is the most that the first has beside another"
    for tenant in ("a", "c"):
        for number in range(20, 40):
            recent.note(prepared(f"{tenant}{number}", (1, 2), tenant), INFO, [5 if tenant == "a" else 7], 0.0)
    assert {prefix.prompt.tenant: prefix.weight for prefix in recent.hottest(kind, 10, 0.0)} == {"a": 3.0, "b": 2.0, "c": 3.0}


def test_the_prompts_of_a_session_end_with_it() -> None:
    recent, state = RecentPrompts(), SessionState("t", "s", "m")
    for number, session_id in enumerate(["s", "s", "another", ""]):
        recent.note(prepared(str(number), (1, 2), "t", session_id), INFO, [5], 0.0)
    recent.note(prepared("theirs", (1, 2), "u", "s"), INFO, [5], 0.0)
    recent.forget("t", "s", "another model")
    assert len(recent) == 5
    recent.forget("t", "s")
    assert len(recent) == 3
    state.is_released = True
    recent.note(prepared("open", (1, 2), "t", "s", state), INFO, [5], 0.0)
    assert len(recent) == 3
    recent.forget("nobody", "s")


def test_nothing_is_known_of_workers_whose_weights_are_not() -> None:
    recent, stock = RecentPrompts(), worker_pb2.WorkerInfo(identity=common_pb2.Identity(model="m"))
    recent.note(prepared("a", (1, 2)), stock, [5], 0.0)
    recent.note(prepared("b", (1,)), INFO, [], 0.0)
    assert len(recent) == 0
