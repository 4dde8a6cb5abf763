"""What a TokenRequest becomes in the engine's protocol, and what comes back; and the addresses of engines."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pdmesh.runtime.config import ConfigError, parse
from pdmesh.runtime.errors import OTHER_ENGINE, FailedPrecondition
from pdmesh.third_party.vllm import vllm_engine_pb2 as pb
from pdmesh.v1 import common_pb2
from router.config import RouterConfig
from router.engine_bridge.address import EngineAddress
from router.engine_bridge.translation import NUM_SEEDS, check, engine_calls, logprobs_of
from router.main import Router
from tests.router.engine_bridge.engines import address_of
from tests.router.mesh import config_for, running_mesh

STOP = common_pb2.FINISH_REASON_STOP


def token_request(
    emitted: tuple[common_pb2.EmittedChoice, ...] = (), *, constraint: common_pb2.Constraint | None = None, **sampling: Any
) -> common_pb2.TokenRequest:
    params = common_pb2.SamplingParams(**{"n": 1, "max_tokens": 10, "seed": 7, **sampling}, constraint=constraint)
    return common_pb2.TokenRequest(model="tiny", prompt_token_ids=[1, 2, 3], sampling=params, emitted=emitted)


def test_a_request_that_goes_on_is_one_call_for_each_unfinished_choice() -> None:
    emitted = (
        common_pb2.EmittedChoice(index=0, token_ids=[8, 9]),
        common_pb2.EmittedChoice(index=1, token_ids=[8], finish_reason=STOP),
        common_pb2.EmittedChoice(index=2, token_ids=[5, 5, 5, 5]),
    )
    first, last = engine_calls(token_request(emitted, n=3, min_tokens=3), "a")
    assert list(first.request.tokenized.input_ids) == [1, 2, 3, 8, 9]
    assert list(last.request.tokenized.input_ids) == [1, 2, 3, 5, 5, 5, 5]
    assert (first.choices, last.choices) == (((0, 2),), ((2, 4),))
    params = [call.request.sampling_params for call in (first, last)]
    assert [(each.n, each.seed, each.max_tokens, each.min_tokens) for each in params] == [(1, 7, 8, 1), (1, 9, 6, 0)]
    assert first.request.request_id != last.request.request_id


@pytest.mark.parametrize(("temperature", "num_calls"), [(0.0, 1), (0.7, 1), (0.0, 3), (0.7, 3)])
def test_only_greedy_choices_are_calls_of_their_own(temperature: float, num_calls: int) -> None:
    calls = engine_calls(token_request(n=num_calls, temperature=temperature), "a")
    assert len(calls) == (num_calls if temperature == 0 else 1)
    assert [choice for call in calls for choice in call.choices] == [(choice, 0) for choice in range(num_calls)]
    assert sum(call.request.sampling_params.n for call in calls) == num_calls


@pytest.mark.parametrize(
    ("seed", "sent"), [(0, 0), (NUM_SEEDS - 1, NUM_SEEDS - 1), (NUM_SEEDS, 0), (2**64 - 1, (2**64 - 1) % NUM_SEEDS)]
)
def test_seeds_are_always_sent_and_fit(seed: int, sent: int) -> None:
    (call,) = engine_calls(token_request(seed=seed), "a")
    assert call.request.sampling_params.HasField("seed") and call.request.sampling_params.seed == sent


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (common_pb2.Constraint(json_schema="{}"), pb.SamplingParams(json_schema="{}")),
        (common_pb2.Constraint(regex="a+"), pb.SamplingParams(regex="a+")),
        (common_pb2.Constraint(grammar="start: X"), pb.SamplingParams(grammar="start: X")),
        (
            common_pb2.Constraint(choice=common_pb2.Alternatives(values=["a"])),
            pb.SamplingParams(choice=pb.ChoiceConstraint(choices=["a"])),
        ),
    ],
)
def test_constraints(ours: common_pb2.Constraint, theirs: pb.SamplingParams) -> None:
    (call,) = engine_calls(token_request(constraint=ours), "a")
    kind = theirs.WhichOneof("constraint")
    assert call.request.sampling_params.WhichOneof("constraint") == kind
    assert getattr(call.request.sampling_params, str(kind)) == getattr(theirs, str(kind))
    check(token_request(constraint=ours), shares_cache=False)
    with pytest.raises(FailedPrecondition) as caught:
        begun = common_pb2.EmittedChoice(token_ids=[4])
        check(token_request((begun,), constraint=ours), shares_cache=False)
    assert (caught.value.field, caught.value.reason) == ("sampling.constraint", OTHER_ENGINE)


def test_a_tenants_own_salt_is_refused_where_tenants_share() -> None:
    request = token_request()
    request.tenant, request.cache_salt = "ab", "2:ab:"
    check(request, shares_cache=True)
    request.cache_salt = "2:ab:own"
    with pytest.raises(FailedPrecondition) as caught:
        check(request, shares_cache=True)
    assert caught.value.field == "options.cache_salt"


def test_logprobs_are_the_most_likely_first_also_if_the_drawn_one_is_not() -> None:
    """vLLM puts the drawn token before the most likely ones, so one more is asked for."""
    (call,) = engine_calls(token_request(logprobs=2), "a")
    assert call.request.sampling_params.logprobs == 3
    said = pb.OutputLogProbs(
        token_ids=[7], token_logprobs=[-5.0], top_logprobs=[pb.TopLogProbs(values=[-5.0, -0.5, -1.0], token_ids=[7, 1, 2])]
    )
    (entry,) = logprobs_of(said, 2)
    assert (entry.chosen.token_id, [top.token_id for top in entry.top]) == (7, [1, 2])


@pytest.mark.parametrize(
    ("text", "engine"),
    [
        ("grpc://a:1", EngineAddress("a:1")),
        ("grpc://10.0.0.1:65535/", EngineAddress("10.0.0.1:65535")),
        ("grpc://[::1]:5", EngineAddress("[::1]:5")),
        ("tiny=grpc://a:1", EngineAddress("a:1", "tiny")),
    ],
)
def test_addresses(model_folder: Path, text: str, engine: EngineAddress) -> None:
    assert config_for(model_folder, engine_address=(text,)).engine_addresses() == (engine,)


@pytest.mark.parametrize(
    ("texts", "problem"),
    [
        (["a:1"], "is not [NAME=]grpc://HOST:PORT"),
        (["http://a:1"], "not over HTTP"),
        (["grpcs://a:1"], "have no TLS"),
        (["grpc://a"], "names no host and port"),
        (["grpc://a:0"], "names no host and port"),
        (["grpc://a:1/x"], "names no host and port"),
        (["=grpc://a:1"], "has no name before the ="),
        (["grpc://a:1", "grpc://a:1"], "is given twice"),
        (["other=grpc://a:1"], "'other' is not in --models"),
    ],
)
def test_wrong_addresses_name_the_flag(model_folder: Path, texts: list[str], problem: str) -> None:
    flags = ["--models", f"tiny={model_folder}", *(part for text in texts for part in ("--engine-address", text))]
    with pytest.raises(ConfigError) as caught:
        parse(RouterConfig, flags, {}, prog="router")
    assert problem in str(caught.value) and "engine" in str(caught.value).split(":")[0]


async def test_what_is_no_engine_or_has_another_model_is_an_error_at_the_start(model_folder: Path) -> None:
    async with running_mesh(model_folder, prefill=0) as engine:
        worker = config_for(model_folder, engine_address=(f"grpc://{engine['d0'].address}",))
        with pytest.raises(ConfigError, match=r"--engine-address: .* does not serve vllm\.grpc\.engine\.VllmEngine"):
            await Router(worker).start()
        target = f"grpc://{address_of(engine)}"
        other = config_for(model_folder, models=(f"other={model_folder}",), engine_address=(target,))
        with pytest.raises(ConfigError, match=r"--engine-address: .* serves 'tiny', and --models has other"):
            await Router(other).start()
        named = Router(replace(other, engine_address=(f"other={target}",)))
        await named.start()
        await named.stop()
