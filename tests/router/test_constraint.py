"""A client's constraint: refused by name before a worker hears of it, or given to the workers as it is."""

from __future__ import annotations

import asyncio
import json
import time
from functools import partial
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from pdmesh.runtime.errors import InvalidArgument, ResourceExhausted, error_from_rpc
from pdmesh.text.grammar import GrammarCompiler
from pdmesh.text.tokenizer import Tokenizer
from pdmesh.v1 import common_pb2, mesh_pb2
from router.api import validation
from tests.router.mesh import request, running_mesh
from tests.support.tiny_models import IM_END, VOCAB_SIZE, write_byte_tokenizer

CHOICES = common_pb2.Alternatives(values=["yes", "no"])


@pytest.fixture(scope="module")
def grammars(tmp_path_factory: pytest.TempPathFactory) -> GrammarCompiler:
    folder = tmp_path_factory.mktemp("bytes")
    write_byte_tokenizer(folder)
    return GrammarCompiler(Tokenizer.load(folder).to_json(), VOCAB_SIZE, {IM_END})


def sampling(**constraint_fields: object) -> common_pb2.SamplingParams:
    return common_pb2.SamplingParams(constraint=common_pb2.Constraint(**constraint_fields))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "field"),
    [
        (sampling(), "sampling.constraint"),
        (sampling(json_schema='{"type": 3}'), "sampling.constraint.json_schema"),
        (sampling(json_schema=""), "sampling.constraint.json_schema"),
        (sampling(regex="(a"), "sampling.constraint.regex"),
        (sampling(choice=common_pb2.Alternatives()), "sampling.constraint.choice"),
        (sampling(choice=common_pb2.Alternatives(values=["a", ""])), "sampling.constraint.choice"),
        (sampling(grammar="start: x"), "sampling.constraint.grammar"),
        (common_pb2.SamplingParams(min_tokens=2, constraint=common_pb2.Constraint(regex="a+")), "sampling.min_tokens"),
        (common_pb2.SamplingParams(ignore_eos=True, constraint=common_pb2.Constraint(regex="a+")), "sampling.ignore_eos"),
    ],
)
async def test_refused_by_name(given: common_pb2.SamplingParams, field: str, grammars: GrammarCompiler) -> None:
    with pytest.raises(InvalidArgument) as refused:
        await validation.compile_constraint(grammars, given)
    assert refused.value.field == field
    assert field in refused.value.message


async def test_right_ones_compile(grammars: GrammarCompiler) -> None:
    assert await validation.compile_constraint(grammars, common_pb2.SamplingParams()) is None
    for given in (sampling(json_schema="{}"), sampling(regex="a|b"), sampling(choice=CHOICES), sampling(grammar='start: "a"')):
        compiled = await validation.compile_constraint(grammars, given)
        assert compiled is not None
        assert await validation.compile_constraint(grammars, given) is compiled


async def test_what_takes_too_long_is_refused(grammars: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(validation.threads, "timeout_s", 0.01)
    large = json.dumps({"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(1500)}})
    began = time.monotonic()
    with pytest.raises(InvalidArgument, match="simpler"):
        await validation.compile_constraint(grammars, sampling(json_schema=large))
    assert time.monotonic() - began < 3.0


async def test_only_what_follows_can_be_resumed(grammars: GrammarCompiler) -> None:
    grammar = await validation.compile_constraint(grammars, sampling(choice=CHOICES))
    assert grammar is not None
    matcher, yes = grammar.matcher(), list[int]()
    matcher.take(first := max(token for token in range(256) if matcher.allowed()[token // 32] >> (token % 32) & 1))
    while matcher.forced is not None and matcher.forced != IM_END:
        yes.append(matcher.forced)
        matcher.take(yes[-1])
    right = common_pb2.EmittedChoice(index=1, token_ids=[first, *yes])
    await validation.check_history(grammar, [right])
    ended = common_pb2.EmittedChoice(index=0, token_ids=[1, 2, 3], finish_reason=common_pb2.FINISH_REASON_STOP)
    wrong = common_pb2.EmittedChoice(index=2, token_ids=[first, first])
    with pytest.raises(InvalidArgument) as refused:
        await validation.check_history(grammar, [ended, right, wrong])
    assert refused.value.field == "resume.emitted[2].token_ids[1]"


async def test_waiting_in_line_is_no_fault_of_the_grammar(grammars: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time counts from when a thread takes it; a line that is too long is overload."""
    monkeypatch.setattr(validation.threads, "timeout_s", 0.4)
    monkeypatch.setattr(validation.threads, "max_waiting", 6)
    ahead = [asyncio.create_task(validation.threads.run(partial(time.sleep, 0.3))) for _ in range(5)]
    await asyncio.sleep(0)
    waiting = asyncio.create_task(validation.compile_constraint(grammars, sampling(regex="in line")))
    await asyncio.sleep(0)
    with pytest.raises(ResourceExhausted) as refused:
        await validation.compile_constraint(grammars, sampling(regex="too long a line"))
    assert refused.value.retry_delay_s is not None
    assert await waiting is not None
    await asyncio.gather(*ahead)


async def test_workers_get_what_is_right_and_nothing_else(model_folder: Path) -> None:
    async with running_mesh(model_folder) as mesh:
        wanted = common_pb2.Constraint(choice=CHOICES)
        await mesh.generate(request(constraint=wanted))
        assert [submit.request.sampling.constraint for submit in mesh["d0"].submits] == [wanted]
        assert [prefill.request.sampling.constraint for prefill in mesh["p0"].prefills] == [wanted]
        chat = mesh_pb2.ChatRequest(
            messages=[mesh_pb2.ChatMessage(role="user", content="hi")], sampling=sampling(json_schema="[]"), model="tiny"
        )
        history = mesh_pb2.Resume(seed=5, emitted=[common_pb2.EmittedChoice(index=0, token_ids=[0])])
        calls: list[tuple[grpc.aio.UnaryStreamCall[Any, mesh_pb2.GenerateResponse], str]] = [
            (mesh.stub.Generate(request(constraint=common_pb2.Constraint(regex="*"))), "sampling.constraint.regex"),
            (mesh.stub.Chat(chat), "sampling.constraint.json_schema"),
            (mesh.stub.Generate(request(constraint=wanted, resume=history)), "resume.emitted[0].token_ids[0]"),
        ]
        for call, field in calls:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call.read()
            error = error_from_rpc(caught.value)
            assert (error.code, error.field) == (grpc.StatusCode.INVALID_ARGUMENT, field)
        assert len(mesh["d0"].submits) == 1
