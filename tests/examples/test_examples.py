"""The examples against real routers in front of stub workers, whose tokens are known."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from pathlib import Path

import pytest

from router.flow_control.slo_admission import FlowItem, Refusal, Ticket
from tests.examples.programs import ROOT, TIMEOUT_S, example, output_of, started
from tests.router import stub_model
from tests.router.mesh import Mesh, running_mesh
from tests.support.waiting import eventually

STORY = "Once upon a time"


async def story(mesh: Mesh, num_tokens: int, seed: int = 7, prompt: str = STORY) -> list[int]:
    """Tokens that the stub workers give for a text."""
    (model,) = mesh.router.core.models.values()
    return stub_model.output(list(model.tokenizer.encode(prompt)), seed, 0, num_tokens)


async def test_async_stream(model_folder: Path) -> None:
    async with running_mesh(model_folder) as mesh:
        shown = await output_of(*example("async_stream"), mesh.router.server.address)
        for prompt in (STORY, "The capital of France is"):
            assert f"{prompt!r} → {stub_model.text_of(await story(mesh, 24, prompt=prompt))!r}" in shown
        assert shown.count("24 tokens, the first after") == 2
        await mesh.until_whole()


async def test_sync_stream(model_folder: Path) -> None:
    async with running_mesh(model_folder) as mesh:
        shown = await output_of(*example("sync_stream"), mesh.router.server.address)
        text, again = shown.splitlines()
        assert re.fullmatch("[a-z]{32}", text)
        seeds = [submit.request.sampling.seed for submit in mesh["d0"].submits]
        assert again == f"seed {seeds[0]} again: the same" and seeds == [seeds[0]] * 2
        await mesh.until_whole()


async def test_deadline(model_folder: Path) -> None:
    async with running_mesh(model_folder) as mesh:
        mesh["d0"].pause_at = 5
        shown = await output_of(*example("deadline"), mesh.router.server.address, "2")
        assert re.match(r"deadline after 2\.\d s with 5 tokens: ", shown)
        await mesh.until_whole()
        assert mesh["d0"].cancels == [mesh["d0"].submits[0].request_id]
        # gRPC rounds a deadline up on its way: some milliseconds more than 2 s may be left.
        assert 0 < mesh["d0"].submits[0].time_left_ms <= 2100
        mesh["d0"].resume.set()
        assert "complete after" in await output_of(*example("deadline"), mesh.router.server.address, "30")


async def test_cancel(model_folder: Path) -> None:
    async with running_mesh(model_folder) as mesh:
        mesh["d0"].pause_at = 5
        shown = await output_of(*example("cancel"), mesh.router.server.address)
        left, outside, task, status = shown.splitlines()
        assert left in [f"left after {number} tokens" for number in (3, 4, 5)]
        assert (outside, task) == ("the stream was cancelled", "the task is cancelled")
        assert status == "0 requests in flight"
        await mesh.until_whole()
        assert sorted(mesh["d0"].cancels) == sorted(submit.request_id for submit in mesh["d0"].submits)


async def test_retry_goes_on_at_another_router(model_folder: Path) -> None:
    async with running_mesh(model_folder) as one, running_mesh(model_folder) as other:
        one["d0"].pause_at = 5
        routers = f"{one.router.server.address},{other.router.server.address}"
        async with started(*example("retry"), routers) as process:
            assert process.stdout is not None
            assert await asyncio.wait_for(process.stdout.readline(), TIMEOUT_S) == b"started with seed 7\n"
            await eventually(lambda: any(held.sent == {0: 5} for held in one["d0"].held.values()))
            await one.router.server.server.stop(None)
            out, err = await asyncio.wait_for(process.communicate(), TIMEOUT_S)
            assert (process.returncode, err) == (0, b"")
        shown = out.decode()
        assert "complete; 1 routers were lost on the way" in shown
        assert f"tokens: {' '.join(map(str, await story(one, 40)))}\n" in shown
        assert len(other["d0"].submits) == 1
        await other.until_whole()


async def test_retry_waits_while_the_mesh_is_full(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with running_mesh(model_folder, max_inflight=1, max_queued=0) as mesh:
        mesh["d0"].pause_at = 5
        admission, answers = mesh.router.core.flow_control.admission, list[Ticket | Refusal]()
        ask = admission.ask

        def recorded(applicant: FlowItem, now: float) -> Ticket | Refusal:
            answers.append(ask(applicant, now))
            return answers[-1]

        monkeypatch.setattr(admission, "ask", recorded)
        async with started(*example("deadline"), mesh.router.server.address, "30"):
            await eventually(lambda: admission.num_inflight == 1)
            async with started(*example("retry"), mesh.router.server.address) as process:
                await eventually(lambda: isinstance(answers[-1], Refusal))
                mesh["d0"].resume.set()
                out, err = await asyncio.wait_for(process.communicate(), TIMEOUT_S)
                assert (process.returncode, err) == (0, b"")
                assert "complete; 0 routers were lost" in out.decode()
        assert isinstance(answers[-1], Ticket)


async def test_plain_grpc_balances_and_explains(model_folder: Path) -> None:
    async with running_mesh(model_folder) as one, running_mesh(model_folder) as other:
        shown = await output_of(*example("plain_grpc"), f"{one.router.server.address},{other.router.server.address}")
        *answers, explanation, field = shown.splitlines()
        assert len(answers) == 4 and all(re.fullmatch("'[a-z]{16}'", line) for line in answers)
        assert len(one["d0"].submits) + len(other["d0"].submits) == 4
        assert explanation.startswith("INVALID_ARGUMENT: ") and field.startswith("field text")


async def test_plain_grpc_resumes(model_folder: Path) -> None:
    async with running_mesh(model_folder) as one, running_mesh(model_folder) as other:
        for mesh in (one, other):
            mesh["d0"].pause_at = 5
        async with started(*example("plain_grpc"), f"{one.router.server.address},{other.router.server.address}") as process:
            await eventually(lambda: one["d0"].held or other["d0"].held, timeout_s=TIMEOUT_S)
            hit, spared = (one, other) if one["d0"].held else (other, one)
            await eventually(lambda: any(held.sent == {0: 5} for held in hit["d0"].held.values()))
            (submit,) = hit["d0"].submits
            await asyncio.sleep(0.1)  # the five tokens are on their way to the client
            for mesh in (one, other):
                mesh["d0"].pause_at = None
            await hit.router.server.server.stop(None)
            out, err = await asyncio.wait_for(process.communicate(), TIMEOUT_S)
            assert (process.returncode, err) == (0, b"")
        expected = stub_model.output(list(submit.request.prompt_token_ids), submit.request.sampling.seed, 0, 16)
        assert out.decode().splitlines()[0] == repr(stub_model.text_of(expected))
        assert list(spared["d0"].submits[0].request.emitted[0].token_ids) == expected[:5]


async def test_reflection_lists_and_calls(model_folder: Path) -> None:
    async with running_mesh(model_folder) as mesh:
        address = mesh.router.server.address
        listed = await output_of(*example("reflection"), address)
        assert "pdmesh.v1.Mesh/Generate(pdmesh.v1.GenerateRequest) returns (stream pdmesh.v1.GenerateResponse)" in listed
        assert "grpc.health.v1.Health/Check" in listed
        body = json.dumps({"text": STORY, "sampling": {"max_tokens": 8, "seed": 7}})
        called = await output_of(*example("reflection"), address, "pdmesh.v1.Mesh/Generate", body)
        messages = [json.loads(line) for line in called.splitlines()]
        assert messages[0]["started"]["seed"] == "7" and "completed" in messages[-1]
        token_ids = [token for message in messages for token in message.get("delta", {}).get("token_ids", [])]
        assert token_ids == await story(mesh, 8)
        tokenized = json.loads(await output_of(*example("reflection"), address, "pdmesh.v1.Mesh/Tokenize", '{"text": "ab"}'))
        assert len(tokenized["token_ids"]) == 2


@pytest.mark.skipif(not (shutil.which("grpcurl") or shutil.which("buf")), reason="neither grpcurl nor buf is installed")
async def test_shell(model_folder: Path) -> None:
    async with running_mesh(model_folder) as mesh:
        shown = await output_of("sh", str(ROOT / "examples/shell.sh"), mesh.router.server.address)
        assert "pdmesh.v1.Mesh" in shown and "completed" in shown
        assert stub_model.text_of((await story(mesh, 8))[:1]) in shown
