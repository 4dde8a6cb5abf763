"""What only completions have: a suffix, and the best of several choices."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
import pytest_asyncio
import tokenizers
from tokenizers import AddedToken

from pdmesh.v1 import common_pb2
from tests.router import stub_model
from tests.router.mesh import PROMPT, Mesh, running_mesh, write_model
from tests.router.openai.conftest import client_of
from tests.router.openai.test_answers import text

pytestmark = pytest.mark.asyncio(loop_scope="module")
NAMES = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|fim_pad|>")


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def filling(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Mesh]:
    """A model with tokens for a gap."""
    folder: Path = write_model(tmp_path_factory.mktemp("filling"))
    path = str(folder / "tokenizer.json")
    backend = tokenizers.Tokenizer.from_file(path)
    backend.add_tokens([AddedToken(name, special=False, normalized=False) for name in NAMES])
    backend.save(path)
    async with running_mesh(folder, http_port=0) as mesh:
        yield mesh
        await mesh.until_whole()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("prompt", "suffix", "written"),
    [
        ("def f(", "):", "<|fim_prefix|>def f(<|fim_suffix|>):<|fim_middle|>"),
        ("", "\nend", "<|fim_prefix|><|fim_suffix|>\nend<|fim_middle|>"),
        ([70, 71], "):", None),
        ("x" * 500, "y" * 9000, "context"),
    ],
)
async def test_a_gap_is_filled(filling: Mesh, prompt: Any, suffix: str, written: str | None, stream: bool) -> None:
    tokenizer = filling.router.core.models["tiny"].tokenizer
    asked: Any = {"model": "tiny", "prompt": prompt, "suffix": suffix, "max_tokens": 4, "seed": 5, "stream": stream}
    async with client_of(filling) as client:
        if written == "context":
            with pytest.raises(openai.BadRequestError) as refused:
                await client.completions.create(**asked)
            assert (refused.value.code, refused.value.param) == ("context_length_exceeded", "prompt")
            return
        answer: Any = await client.completions.create(**asked)
        pieces = [chunk.choices[0].text async for chunk in answer] if stream else [answer.choices[0].text]
    request = filling["d0"].submits[-1].request
    sent = list(request.prompt_token_ids)
    wanted = written or f"<|fim_prefix|>{tokenizer.decode([70, 71])}<|fim_suffix|>):<|fim_middle|>"
    assert tokenizer.decode(sent, skip_special_tokens=False) == wanted
    assert "".join(pieces) == text(4, prompt=sent)
    assert set(request.sampling.stop_token_ids) == {tokenizer.token_id(name) for name in NAMES} | {
        tokenizer.token_id("<|endoftext|>")
    }


async def test_a_suffix_excludes_echo_and_needs_a_model(filling: Mesh, served: Mesh) -> None:
    async with client_of(filling) as client, client_of(served) as other:
        with pytest.raises(openai.BadRequestError) as refused:
            await client.completions.create(model="tiny", prompt="a", suffix="b", echo=True)
        assert refused.value.param == "echo"
        with pytest.raises(openai.BadRequestError) as refused:
            await other.completions.create(model="tiny", prompt="a", suffix="b")
        assert refused.value.param == "suffix" and "fill-in-the-middle" in refused.value.message


@pytest.mark.parametrize("logprobs", [None, 1])
async def test_the_best_choices_are_the_answer(
    served: Mesh, client: Any, monkeypatch: pytest.MonkeyPatch, logprobs: int | None
) -> None:
    """The likelihood of a token is made of its id here, so that each choice has one of its own."""

    def entry(request: common_pb2.TokenRequest, token_id: int) -> list[common_pb2.Logprobs]:
        return [common_pb2.Logprobs(chosen=common_pb2.TokenLogprob(token_id=token_id, logprob=-token_id / 7 % 3))]

    monkeypatch.setattr(stub_model, "logprobs", entry)
    prompts = [PROMPT, PROMPT[:20]]
    answer = await client.completions.create(
        model="tiny", prompt=prompts, n=2, best_of=4, max_tokens=6, seed=5, logprobs=logprobs
    )
    wanted = []
    for prompt in prompts:
        outputs = [stub_model.output(prompt, 5, choice, 6) for choice in range(4)]
        ranked = sorted(range(4), key=lambda choice: sum(-token / 7 % 3 for token in outputs[choice]), reverse=True)
        wanted += [text(6, prompt=prompt, choice=choice) for choice in ranked[:2]]
    assert [choice.text for choice in answer.choices] == wanted and len(set(wanted)) == 4
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert all((choice.logprobs is None) == (logprobs is None) for choice in answer.choices)
    assert answer.usage.completion_tokens == 2 * 4 * 6
    assert served["d0"].submits[-1].request.sampling.n == 4


async def test_as_many_as_n_change_nothing(served: Mesh, client: Any) -> None:
    answer = await client.completions.create(model="tiny", prompt=PROMPT, n=2, best_of=2, max_tokens=3, seed=5)
    assert [choice.text for choice in answer.choices] == [text(3, choice=choice) for choice in (0, 1)]
    assert not served["d0"].submits[-1].request.sampling.HasField("logprobs")
    assert json.loads(answer.model_dump_json())["choices"][0]["logprobs"] is None
