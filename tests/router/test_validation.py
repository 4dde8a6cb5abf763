"""Each wrong field is refused by its name; what is right passes."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdmesh.runtime.errors import InvalidArgument
from pdmesh.v1 import common_pb2, mesh_pb2
from router.api import validation
from router.api.validation import Limits, complete

LIMITS = Limits(vocab_size=320, eos_token_ids=frozenset({258}), room=100)
NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
LENGTH = common_pb2.FINISH_REASON_LENGTH


def _sampling(**fields: object) -> common_pb2.SamplingParams:
    return common_pb2.SamplingParams(**fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        *(({name: bad}, name) for name in NUMBERS for bad in (math.nan, math.inf, -math.inf)),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": 1e-9}, "temperature"),
        ({"temperature": 101.0}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"min_p": -0.1}, "min_p"),
        ({"min_p": 1.1}, "min_p"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"repetition_penalty": -1.0}, "repetition_penalty"),
        ({"presence_penalty": 2.1}, "presence_penalty"),
        ({"frequency_penalty": -2.1}, "frequency_penalty"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 101}, "max_tokens"),
        ({"max_tokens": 4, "min_tokens": 5}, "min_tokens"),
        ({"min_tokens": 101}, "min_tokens"),
        ({"n": 17}, "n"),
        ({"logprobs": 21}, "logprobs"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop": ["x", ""]}, "stop[1]"),
        ({"stop": ["x" * 1001]}, "stop[0]"),
        ({"stop_token_ids": [1, 320]}, "stop_token_ids[1]"),
        ({"stop_token_ids": [1] * 257}, "stop_token_ids"),
        ({"stop_token_ids": [258], "ignore_eos": True}, "stop_token_ids"),
    ],
)  # fmt: skip
def test_wrong_sampling(fields: dict[str, object], name: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        complete(_sampling(**fields), LIMITS)
    assert refused.value.field == f"sampling.{name}"
    assert f"sampling.{name}" in refused.value.message


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"temperature": 0.0},
        {"temperature": 100.0, "top_k": 2**32 - 1, "top_p": 1.0, "min_p": 1.0, "repetition_penalty": 1.3},
        {"max_tokens": 100, "min_tokens": 100, "presence_penalty": -2.0, "frequency_penalty": 2.0},
        {"n": 16, "logprobs": 0, "stop": ["a", "b"], "stop_token_ids": [0, 319], "ignore_eos": True, "seed": 2**64 - 1},
    ],
)
def test_right_sampling_is_completed(fields: dict[str, object]) -> None:
    given_ = _sampling(**fields)
    checked = complete(given_, LIMITS)
    assert (checked.n, checked.max_tokens) == (given_.n or 1, given_.max_tokens or LIMITS.room)
    assert not checked.stop
    assert checked.HasField("seed") == given_.HasField("seed")
    assert checked.HasField("logprobs") == given_.HasField("logprobs")


@given(st.builds(_sampling, **{name: st.floats(width=64) for name in ("temperature", "top_p", "min_p", "repetition_penalty")}))
def test_any_numbers_are_completed_or_refused_by_name(sampling: common_pb2.SamplingParams) -> None:
    try:
        checked = complete(sampling, LIMITS)
    except InvalidArgument as error:
        assert error.field is not None and error.field.startswith("sampling.")
    else:
        assert math.isfinite(checked.temperature) and 0 < checked.top_p <= 1 and 0 <= checked.min_p <= 1


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"request_id": "a b"}, "request_id"),
        ({"request_id": "x" * 65}, "request_id"),
        ({"request_id": "ü"}, "request_id"),
        ({"tenant": "x" * 129}, "tenant"),
        ({"cache_salt": "x" * 257}, "cache_salt"),
        ({"priority": 9}, "priority"),
        ({"mode": 9}, "mode"),
        ({"session_id": "two words"}, "session_id"),
        ({"session_id": "ü"}, "session_id"),
        ({"session_id": "a\x7f"}, "session_id"),
        ({"session_id": "x" * 257}, "session_id"),
        ({"session_final": True}, "session_final"),
        ({"kv_retention_s": 86_401}, "kv_retention_s"),
        ({"priority_hint": 1001}, "priority_hint"),
        ({"priority_hint": -1001}, "priority_hint"),
    ],
)
def test_wrong_options(options: dict[str, object], name: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        validation.check_options(mesh_pb2.RequestOptions(**options))  # type: ignore[arg-type]
    assert refused.value.field == f"options.{name}"


def test_the_widest_options_of_a_session_pass() -> None:
    widest = {"session_id": "!~" * 128, "kv_retention_s": 86_400, "session_final": True, "priority_hint": -1000}
    validation.check_options(mesh_pb2.RequestOptions(**widest))  # type: ignore[arg-type]
    validation.check_options(mesh_pb2.RequestOptions(kv_retention_s=5, priority_hint=1000))


def test_the_error_about_a_session_does_not_repeat_its_id() -> None:
    with pytest.raises(InvalidArgument) as refused:
        validation.check_options(mesh_pb2.RequestOptions(session_id="secret name"))
    assert "secret" not in refused.value.message


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        ([], "messages"),
        ([("", "hello")], "messages[0].role"),
        ([("user", "hello"), ("x" * 65, "")], "messages[1].role"),
        ([("user", "x" * 11)], "messages"),
    ],
)
def test_wrong_messages(messages: list[tuple[str, str]], field: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        validation.check_messages([mesh_pb2.ChatMessage(role=role, content=content) for role, content in messages], max_bytes=10)
    assert refused.value.field == field


@pytest.mark.parametrize(("num_tokens", "right"), [(0, False), (1, True), (99, True), (100, False), (1000, False)])
def test_prompt_length(num_tokens: int, right: bool) -> None:
    if right:
        validation.check_prompt_length(num_tokens, 100)
        return
    with pytest.raises(InvalidArgument) as refused:
        validation.check_prompt_length(num_tokens, 100)
    assert refused.value.field == "prompt"


def test_max_tokens_beyond_the_context_are_clipped_where_that_is_wanted() -> None:
    limits = Limits(320, frozenset({258}), room=20, num_prompt=80, clips=True)
    assert complete(_sampling(max_tokens=30), limits).max_tokens == complete(_sampling(), limits).max_tokens == 20
    assert complete(_sampling(max_tokens=7), limits).max_tokens == 7
    with pytest.raises(InvalidArgument, match="min_tokens"):
        complete(_sampling(max_tokens=30, min_tokens=25), limits)


def test_what_exceeds_the_context_names_field_reason_and_numbers() -> None:
    with pytest.raises(InvalidArgument) as refused:
        complete(_sampling(max_tokens=30), Limits(320, frozenset({258}), room=20, num_prompt=80))
    assert (refused.value.field, refused.value.reason) == ("sampling.max_tokens", "context_length_exceeded")
    assert refused.value.message == (
        "sampling.max_tokens: This model's maximum context length is 100 tokens. However, you requested 110 tokens "
        "(80 in the prompt, 30 in the completion). Please reduce the length of the prompt or completion."
    )
    with pytest.raises(InvalidArgument, match=r"requested 107 tokens \(100 in the prompt, 7 in the completion\)"):
        validation.check_prompt_length(100, 100, max_tokens=7)


def test_prompt_text() -> None:
    validation.check_prompt_text("äöü", 6)
    for wrong in ("", "äöüx"):
        with pytest.raises(InvalidArgument):
            validation.check_prompt_text(wrong, 6)


def _emitted(index: int, *token_ids: int, finish: int = 0) -> common_pb2.EmittedChoice:
    return common_pb2.EmittedChoice(index=index, token_ids=token_ids, finish_reason=finish)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("emitted", "field"),
    [
        ([_emitted(2, 1)], "resume.emitted[0].index"),
        ([_emitted(1, 1), _emitted(1, 1)], "resume.emitted[1].index"),
        ([_emitted(0, 1, 2, 3, 4, 5)], "resume.emitted[0].token_ids"),
        ([_emitted(0, 1, 320)], "resume.emitted[0].token_ids[1]"),
        ([_emitted(0, 1, finish=7)], "resume.emitted[0].finish_reason"),
        ([_emitted(0, finish=LENGTH)], "resume.emitted[0].finish_reason"),
    ],
)
def test_wrong_resume(emitted: list[common_pb2.EmittedChoice], field: str) -> None:
    sampling = _sampling(n=2, max_tokens=4)
    with pytest.raises(InvalidArgument) as refused:
        validation.check_resume(mesh_pb2.Resume(seed=1, emitted=emitted), sampling, 320)
    assert refused.value.field == field


def test_resume_with_another_seed_is_refused() -> None:
    with pytest.raises(InvalidArgument) as refused:
        validation.check_resume(mesh_pb2.Resume(seed=1), _sampling(n=1, max_tokens=4, seed=2), 320)
    assert refused.value.field == "resume.seed"


def test_resume_names_every_choice_in_order() -> None:
    resume = mesh_pb2.Resume(seed=1, emitted=[_emitted(2, 7, 8), _emitted(0, 9, finish=LENGTH)])
    choices = validation.check_resume(resume, _sampling(n=3, max_tokens=4), 320)
    assert [(choice.index, list(choice.token_ids), choice.finish_reason) for choice in choices] == [
        (0, [9], LENGTH),
        (1, [], 0),
        (2, [7, 8], 0),
    ]


def test_a_choice_that_ended_with_calls_has_stopped_for_workers() -> None:
    resume = mesh_pb2.Resume(seed=1, emitted=[_emitted(0, 1, finish=common_pb2.FINISH_REASON_TOOL_CALLS)])
    (choice,) = validation.check_resume(resume, common_pb2.SamplingParams(n=1, max_tokens=9), vocab_size=9)
    assert choice.finish_reason == common_pb2.FINISH_REASON_STOP and list(choice.token_ids) == [1]
