"""A constraint with a history: replayed while the request is translated, and refused by name where it does not follow."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from pdmesh.runtime.errors import InvalidArgument
from pdmesh.text.grammar import GrammarCompiler
from pdmesh.text.tokenizer import Tokenizer
from pdmesh.v1 import common_pb2
from pdmesh.worker import token_request as worker_token_request
from pdmesh.worker.token_request import TokenRequestTranslator
from tests.support.tiny_models import IM_END, VOCAB_SIZE, write_byte_tokenizer
from tests.support.worker_mesh import MODEL, history, token_request

LETTERS = common_pb2.Constraint(regex="[a-z]*")


@pytest.fixture
def translate(tmp_path: Path) -> TokenRequestTranslator:
    write_byte_tokenizer(tmp_path)
    grammars = GrammarCompiler(Tokenizer.load(tmp_path).to_json(), VOCAB_SIZE, {IM_END})
    return TokenRequestTranslator(MODEL, lambda tenant, salt: b"", grammars)


def asked(*outputs: list[int], constraint: common_pb2.Constraint = LETTERS) -> common_pb2.TokenRequest:
    request = token_request([1, 2, 3], n=len(outputs), max_tokens=5000, emitted=history(*outputs))
    request.sampling.constraint.CopyFrom(constraint)
    request.sampling.ignore_eos = False
    return request


def letter(translate: TokenRequestTranslator) -> int:
    assert translate.grammars is not None
    allowed = translate.grammars.compile("regex", "[a-z]*").matcher().allowed()
    return next(token for token in range(256) if allowed[token // 32] >> token % 32 & 1)


async def test_each_choice_has_its_matcher(translate: TokenRequestTranslator) -> None:
    first = letter(translate)
    request = asked([first] * 3, [], [first] * 4)
    request.emitted[2].finish_reason = common_pb2.FINISH_REASON_STOP
    translated = await translate(request)
    assert [matcher is None for matcher in translated.matchers] == [False, False, True]
    assert (await translate(asked([]))).matchers == ()


async def test_a_stray_history_is_refused_by_name(translate: TokenRequestTranslator) -> None:
    first = letter(translate)
    with pytest.raises(InvalidArgument) as refused:
        await translate(asked([first], [first, first, 300, first]))
    assert refused.value.field == "request.emitted[1].token_ids[2]"


async def test_what_is_refused_names_the_kind(translate: TokenRequestTranslator, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(2):
        with pytest.raises(InvalidArgument) as refused:
            await translate(asked([], constraint=common_pb2.Constraint(regex="(")))
        assert refused.value.field == "request.sampling.constraint.regex"
    monkeypatch.setattr(worker_token_request.threads, "timeout_s", 0.0)
    with pytest.raises(InvalidArgument, match="simpler"):
        await translate(asked([], constraint=common_pb2.Constraint(regex="a{900000}")))


async def test_the_loop_goes_on_while_a_history_is_replayed(translate: TokenRequestTranslator) -> None:
    """It is done in a thread: the loop turns many times meanwhile."""
    request = asked(*[[letter(translate)] * 4000 for _ in range(8)])
    translating, turns = asyncio.create_task(translate(request)), 0
    began = time.monotonic()
    while not translating.done() and time.monotonic() - began < 20:
        await asyncio.sleep(0.001)
        turns += 1
    assert len((await translating).matchers) == 8
    assert turns >= 10
