"""What workers guessed for a request is in its usage: each guess once, whatever was sent again, lost or done elsewhere."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from pdmesh.v1 import mesh_pb2
from router.lifecycle.output import DraftTotals
from tests.router import stub_model
from tests.router.mesh import Answer, Mesh, expected, request, running_mesh
from tests.router.stub_workers import StubWorker
from tests.support.waiting import eventually

REMOTE, LOCAL = mesh_pb2.PREFILL_MODE_REMOTE, mesh_pb2.PREFILL_MODE_LOCAL
GUESSES = 3


def guessing(mesh: Mesh) -> list[StubWorker]:
    workers = [worker for name, worker in mesh.workers.items() if name.startswith("d")]
    for worker in workers:
        worker.guesses = GUESSES
    return workers


def drafts(answer: Answer) -> tuple[int, int]:
    assert answer.completed is not None
    return answer.completed.usage.drafted_tokens, answer.completed.usage.accepted_tokens


def test_the_latest_total_of_each_stay_counts() -> None:
    totals = DraftTotals()
    assert (totals.num_drafted, totals.num_accepted) == (0, 0)
    for stay, choice, drafted, accepted in (("a", 0, 4, 1), ("a", 0, 9, 5), ("a", 1, 2, 0), ("a", 0, 9, 5), ("b", 0, 7, 7)):
        totals.note(stay, choice, drafted, accepted)
    assert (totals.num_drafted, totals.num_accepted) == (18, 12)
    assert (totals.accepted_in("a"), totals.accepted_in("b"), totals.accepted_in("c")) == (5, 7, 0)


@pytest.mark.parametrize("mode", [REMOTE, LOCAL])
async def test_of_all_choices(model_folder: Path, mode: mesh_pb2.PrefillMode.ValueType) -> None:
    async with running_mesh(model_folder) as mesh:
        assert drafts(await mesh.generate(request(n=2, mode=mode))) == (0, 0)
        guessing(mesh)
        assert drafts(await mesh.generate(request(mode=mode))) == (GUESSES * 8, 4)
        assert drafts(await mesh.generate(request(n=3, mode=mode))) == (GUESSES * 24, 12)


async def test_what_the_engine_did_behind_a_stop_string_counts(model_folder: Path) -> None:
    text = stub_model.text_of(expected(40))
    async with running_mesh(model_folder) as mesh:
        (decode,) = guessing(mesh)
        decode.frames_mute = True
        asking = asyncio.create_task(mesh.generate(request(max_tokens=40, mode=LOCAL, stop=[text[10:13]])))
        await eventually(lambda: decode.held and len(next(iter(decode.held.values())).tokens[0]) == 40)
        decode.frames_mute = False  # all tokens come in one frame
        answer = await asking
        assert answer.completed is not None and answer.completed.usage.completion_tokens == 13
        assert drafts(answer) == (GUESSES * 40, 20)


async def test_frames_that_are_sent_again_count_once(model_folder: Path) -> None:
    async with running_mesh(model_folder) as mesh:
        (decode,) = guessing(mesh)
        decode.pause_at = 5
        answering = asyncio.create_task(mesh.generate(request(max_tokens=20)))
        await eventually(lambda: decode.held and len(next(iter(decode.held.values())).tokens[0]) >= 5)
        decode.break_streams()
        await eventually(lambda: len(decode.attaches) == 2)
        decode.resume.set()
        assert drafts(await answering) == (GUESSES * 20, 10)


@pytest.mark.parametrize("mode", [REMOTE, LOCAL])
async def test_both_stays_count(model_folder: Path, mode: mesh_pb2.PrefillMode.ValueType) -> None:
    """The second decode worker goes on behind what the first one has sent."""
    async with running_mesh(model_folder, decode=2) as mesh:
        decodes = guessing(mesh)
        for worker in decodes:
            worker.pause_at = 5
        answering = asyncio.create_task(mesh.generate(request(max_tokens=20, mode=mode)))
        await eventually(lambda: any(worker.held for worker in decodes))
        first, other = decodes if decodes[0].held else decodes[::-1]
        await eventually(lambda: len(next(iter(first.held.values())).tokens[0]) >= 5)
        other.pause_at = None
        await first.kill()
        answer = await answering
        assert answer.tokens() == expected(20)
        before = len(other.submits[-1].request.emitted[0].token_ids)
        assert drafts(answer) == (GUESSES * 20, before // 2 + (20 - before) // 2)


async def test_a_worker_is_judged_by_its_steps(model_folder: Path) -> None:
    """Of what is guessed here, every second token took none: too few steps are left to judge by."""
    async with running_mesh(model_folder) as mesh:
        (decode,) = guessing(mesh)
        for guesses, is_judged in ((GUESSES, False), (0, True)):
            decode.guesses, decode.pause_at = guesses, 1
            decode.resume.clear()
            asking = asyncio.create_task(mesh.generate(request(mode=LOCAL, max_tokens=14)))
            await eventually(lambda: any(each.decode_worker for each in mesh.router.core.migratable))  # it follows the tokens
            decode.resume.set()
            await asking
            await mesh.until_whole()
            measured = sum(breaker.samples for breaker in mesh.router.core.health_recorder.health._breakers.values())
            assert (measured > 0) is is_judged
