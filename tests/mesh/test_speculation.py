"""Guessing tokens changes no answer: one decode worker of the mesh guesses, the other does not, and one engine alone says what is
right. A fixed draft length makes it guess whatever that costs, so that steps which give several tokens are many."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio

from pdmesh.client.client import AsyncClient, Completed, Delta
from pdmesh.client.stream import AsyncStream
from pdmesh.client.types import FinishReason, Generation
from pdmesh.launcher.mesh import LocalMesh
from pdmesh.launcher.plan import LocalMeshConfig, ProcessPlan
from pdmesh.sampling_params import SamplingParams
from pdmesh.text.tokenizer import Tokenizer
from pdmesh.v1 import worker_pb2
from tests.mesh import oracle
from tests.mesh.checks import Footprint, assert_whole
from tests.support.tiny_models import make_tiny_model

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]

GUESSING, PLAIN = "decode-0", "decode-1"
FLAGS = ("--speculation", "prompt_lookup", "--draft-length", "4")
NUM_TOKENS = 160
MAX_TRIES = 10
"""Times that requests are sent until a worker is seen with them."""
NUM_GIVEN = 60
"""Tokens that a worker gives to them before it is killed: the router has heard of most."""
GREEDY: dict[str, object] = {"temperature": 0.0}
DRAWS: dict[str, dict[str, object]] = {
    "greedy": GREEDY,
    "cool": {"temperature": 0.2, "top_k": 3, "seed": 5},
    "with penalties": {"temperature": 0.2, "min_p": 0.05, "seed": 11, "frequency_penalty": 0.01, "presence_penalty": 0.1},
}
MODES = ("remote", "local")
DIRECTIONS = {
    "type": "object",
    "properties": {"way": {"type": "array", "items": {"enum": ["left", "right", "straight on"]}, "minItems": 8, "maxItems": 12}},
    "required": ["way"],
    "additionalProperties": False,
}
EXAMPLE = 'As {"way": ["right", "straight on", "left", "right", "left"]} or abcdabceabcecd' + 9 * "a"
"""With most of what the grammars ask for, so that looking it up finds something whatever a model without any sense chooses."""


@pytest.fixture(scope="module")
def looping(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random model whose output soon repeats itself: there is something to guess."""
    return make_tiny_model(tmp_path_factory.mktemp("models") / "looping", initializer_range=0.05)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def half(looping: Path) -> AsyncIterator[LocalMesh]:
    """One prefill worker, one decode worker that guesses and one that does not; requests go to who has fewest."""

    def adjust(plan: ProcessPlan) -> ProcessPlan:
        if not plan.is_worker:
            return plan
        return replace(plan, argv=(*plan.argv, *(FLAGS if plan.name == GUESSING else ("--speculation", "none"))))

    config = LocalMeshConfig(
        model=str(looping),
        num_prefill=1,
        num_decode=2,
        port=0,
        num_threads=1,
        router_args=("--policy=least-loaded",),
        adjust=adjust,
    )
    async with LocalMesh(config) as mesh:
        footprint = Footprint.of(mesh)
        yield mesh
        footprint.grow(mesh)
    footprint.assert_gone()


def prompt_of(number: int) -> list[int]:
    """With something to look up."""
    return 3 * oracle.prompt_of(700 + number, 17)


async def on_both(mesh: LocalMesh, prompt: list[int] | str, **options: object) -> tuple[Generation, Generation]:
    """The answer of who guesses, and of who does not: asked at once, each gets one. Of more and more, as who has the prompt in
    its cache is preferred, and an answer may be there before the next is asked for."""
    answers: dict[str, Generation] = {}
    num_asked = 2
    async with asyncio.timeout(90), AsyncClient(mesh.router_addresses) as client:
        while len(answers) < 2:  # also while one of them is left out for a moment, as it was slow
            asked = [client.generate(prompt, timeout=60, **options) for _ in range(num_asked)]  # type: ignore[arg-type]
            answers |= {answer.timings.decode_worker: answer for answer in await asyncio.gather(*asked)}
            num_asked = min(16, num_asked + 1)
    return answers[GUESSING], answers[PLAIN]


def tokens(answer: Generation) -> list[list[int]]:
    return [list(choice.token_ids) for choice in answer.choices]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("draw", DRAWS)
async def test_tokens_are_those_of_one_engine(half: LocalMesh, looping: Path, draw: str, mode: str) -> None:
    params = {"max_tokens": NUM_TOKENS, "ignore_eos": True, **DRAWS[draw]}
    guessed, plain = await on_both(half, prompt_of(2), mode=mode, **params)
    assert tokens(guessed) == tokens(plain) == oracle.answer(looping, prompt_of(2), SamplingParams(**params))  # type: ignore[arg-type]
    assert guessed.usage.drafted_tokens > 0
    assert (plain.usage.drafted_tokens, plain.usage.accepted_tokens) == (0, 0)
    if draw == "greedy":
        assert guessed.usage.accepted_tokens > NUM_TOKENS / 4


@pytest.mark.parametrize("mode", MODES)
async def test_several_tokens_come_in_one_message(half: LocalMesh, mode: str) -> None:
    """Each index once and in order, whatever came together; no more of them than were asked for."""
    lengths, num_accepted, num_asked = set(range(NUM_TOKENS, NUM_TOKENS + 6)), 0, 4
    async with asyncio.timeout(120), AsyncClient(half.router_addresses) as client:
        # Of more and more at once, until enough have gone to the worker that guesses: the other one may be the faster.
        for max_tokens in itertools.cycle(sorted(lengths)):
            if not lengths and num_accepted > NUM_TOKENS:
                break
            params = {"max_tokens": max_tokens, "ignore_eos": True, "mode": mode, **GREEDY}
            streams = [client.generate_stream(prompt_of(2), timeout=60, **params) for _ in range(num_asked)]  # type: ignore[arg-type]
            for deltas, completed in await asyncio.gather(*(collected(stream) for stream in streams)):
                assert_in_order(deltas, completed, max_tokens)
                num_accepted += completed.usage.accepted_tokens
            lengths.discard(max_tokens)
            num_asked = min(16, num_asked + 1)
    await assert_whole(half)


def assert_in_order(deltas: Sequence[Delta], completed: Completed, max_tokens: int) -> None:
    """Each index once and in order, as many as were asked for, in no more messages than there were steps."""
    position = 0
    for delta in deltas:
        assert not delta.token_ids or delta.first_index == position
        position += len(delta.token_ids)
    assert position == max_tokens == completed.usage.completion_tokens
    assert deltas[-1].finish_reason is FinishReason.LENGTH
    assert len(deltas) <= max_tokens - completed.usage.accepted_tokens  # one for each step


async def collected(stream: AsyncStream) -> tuple[list[Delta], Completed]:
    events = [event async for event in stream]
    assert isinstance(events[-1], Completed)
    return [event for event in events if isinstance(event, Delta)], events[-1]


@pytest.mark.parametrize("mode", MODES)
async def test_choices_with_logprobs(half: LocalMesh, looping: Path, mode: str) -> None:
    params = {"max_tokens": NUM_TOKENS, "ignore_eos": True, "n": 2, "logprobs": 2, **DRAWS["cool"]}
    guessed, plain = await on_both(half, prompt_of(2), mode=mode, **params)
    assert tokens(guessed) == oracle.answer(looping, prompt_of(2), SamplingParams(**params))  # type: ignore[arg-type]
    assert guessed.choices == plain.choices  # every probability, to the last bit
    assert all(len(choice.logprobs) == NUM_TOKENS for choice in guessed.choices)
    assert guessed.usage.drafted_tokens > 0
    await assert_whole(half)


@pytest.mark.parametrize("mode", MODES)
async def test_stop_strings_end_in_the_middle_of_a_step(half: LocalMesh, looping: Path, mode: str) -> None:
    params = {"max_tokens": NUM_TOKENS, "ignore_eos": True, "mode": mode, **GREEDY}
    free, _ = await on_both(half, prompt_of(2), **params)
    assert free.text == Tokenizer.load(looping).decode(list(free.token_ids))
    middle = len(free.text) // 2  # some of its tokens have no text
    for position in range(middle, middle + 4):
        stop = free.text[position:][:3]
        assert len(stop) == 3
        guessed, plain = await on_both(half, prompt_of(2), stop=[stop], **params)
        assert guessed.text == plain.text == free.text[: free.text.index(stop)]
        assert tokens(guessed) == tokens(plain)
        assert guessed.choices[0].stop_reason == stop
        assert guessed.usage.completion_tokens == len(guessed.token_ids)
    await assert_whole(half)


@pytest.mark.parametrize("mode", MODES)
async def test_stop_tokens_end_in_the_middle_of_a_step(half: LocalMesh, looping: Path, mode: str) -> None:
    params = {"max_tokens": NUM_TOKENS, "ignore_eos": True, **GREEDY}
    [free] = oracle.answer(looping, prompt_of(2), SamplingParams(**params))  # type: ignore[arg-type]
    for token in sorted(set(free))[:4]:
        guessed, plain = await on_both(half, prompt_of(2), stop_token_ids=[token], mode=mode, **params)
        assert tokens(guessed) == tokens(plain) == [free[: free.index(token) + 1]]
        assert guessed.choices[0].finish_reason is FinishReason.STOP
    await assert_whole(half)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "constraint", [{"json_schema": DIRECTIONS}, {"regex": "(ab|cd|ce){50}"}, {"choice": ["a" * 60, "a" * 61]}]
)
async def test_grammars(half: LocalMesh, constraint: dict[str, object], mode: str) -> None:
    """Some tokens are forced, some are not, and drafts follow the grammar or are none."""
    params = {"max_tokens": NUM_TOKENS, "mode": mode, "temperature": 0.6, "seed": 3}
    guessed, plain = await on_both(half, EXAMPLE, **params, **constraint)
    assert tokens(guessed) == tokens(plain)
    assert guessed.choices[0].finish_reason is FinishReason.STOP
    if "choice" not in constraint:  # nothing is left to be guessed there
        assert guessed.usage.drafted_tokens > 0
    computed, other = await on_both(half, EXAMPLE, logprobs=1, **params, **constraint)  # forced tokens do not skip the model
    assert tokens(computed) == tokens(plain)
    assert computed.choices == other.choices
    assert computed.usage.accepted_tokens > len(computed.token_ids) / 4
    await assert_whole(half)


async def test_who_leaves_frees_everything(half: LocalMesh) -> None:
    async with AsyncClient(half.router_addresses) as client:
        for number in range(12):
            params = {"max_tokens": 900, "ignore_eos": True, "mode": MODES[number % 2], "n": 1 + number % 3, **GREEDY}
            stream = client.generate_stream(prompt_of(number), timeout=60, **params)  # type: ignore[arg-type]
            async with stream:
                seen = 0
                async for event in stream:
                    seen += isinstance(event, Delta)
                    if seen > number:
                        break
    await assert_whole(half)


async def test_the_report_says_what_it_does(half: LocalMesh) -> None:
    async with AsyncClient(half.router_addresses) as client:
        status = await client.status()
    loads = {worker.info.worker_id: worker.load for worker in status.workers}
    assert not loads[PLAIN].HasField("speculation") and not loads["prefill-0"].HasField("speculation")
    report = loads[GUESSING].speculation
    [proposer] = report.proposers
    assert proposer.name == "prompt_lookup"
    assert report.num_rows > report.num_drafts > 0
    assert report.num_tokens == report.num_rows + sum(proposer.kept)
    assert len(proposer.verified) == len(proposer.kept) == 4
    assert 1 < report.tokens_per_row < report.computed_per_row <= 5
    assert report.drafting_s > 0


@pytest.mark.parametrize(("victim", "mode"), [(GUESSING, "remote"), (PLAIN, "local")])
async def test_a_killed_worker_costs_no_token(half: LocalMesh, looping: Path, victim: str, mode: str) -> None:
    """What one has guessed goes on where nobody does, and the other way round."""
    numbers, params = range(8), {"max_tokens": 1500, "ignore_eos": True, **DRAWS["cool"]}  # it has to last
    wanted = oracle.answers(looping, [(prompt_of(number), SamplingParams(**params)) for number in numbers])  # type: ignore[arg-type]
    async with AsyncClient(half.router_addresses) as client:
        for _ in range(MAX_TRIES):
            before = await load_of(client, victim)
            asked = [
                asyncio.create_task(client.generate(prompt_of(number), mode=mode, timeout=60, **params))  # type: ignore[arg-type]
                for number in numbers
            ]
            if await is_well_into_them(client, before, asked):
                break
        half.kill(victim)
        answers = await asyncio.gather(*asked)
    assert [tokens(answer) for answer in answers] == wanted
    moved = [answer for answer in answers if answer.timings.num_resubmissions]
    assert moved, f"{victim} had none of them when it was killed"
    assert any(answer.usage.drafted_tokens for answer in moved)
    await half.wait_ready(90)
    await assert_whole(half, timeout_s=30)


async def is_well_into_them(
    client: AsyncClient, before: worker_pb2.LoadReport, asked: Sequence[asyncio.Task[Generation]]
) -> bool:
    """Whether this worker has given them tokens since `before`, drafted ones where it guesses, and several wait for more; False
    once all that was asked has ended."""
    while not all(task.done() for task in asked):
        load = await load_of(client, before.worker_id)
        num_given = load.num_generated_tokens - before.num_generated_tokens
        num_kept = _num_kept(load) - _num_kept(before)
        if load.num_decoding > 1 and num_given >= NUM_GIVEN and (num_kept or not load.HasField("speculation")):
            return True
        await asyncio.sleep(0.01)
    return False


async def load_of(client: AsyncClient, worker_id: str) -> worker_pb2.LoadReport:
    [view] = [view for view in (await client.status()).workers if view.info.worker_id == worker_id]
    return view.load


def _num_kept(load: worker_pb2.LoadReport) -> int:
    """Drafted tokens that were accepted."""
    return sum(sum(proposer.kept) for proposer in load.speculation.proposers)
