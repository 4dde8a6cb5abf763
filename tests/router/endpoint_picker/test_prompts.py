"""What a body says of its prompt."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.endpoint_picker.prompts import TYPICAL_OUTPUT, Prompt, prompt_of

LONG = "The quick brown fox jumps over the lazy dog. " * 40


def of(fields: object) -> Prompt:
    return prompt_of(json.dumps(fields).encode(), 64, 4)


def shared(one: Prompt, other: Prompt) -> int:
    """The number of leading blocks that are the same."""
    return next(
        (n for n, (a, b) in enumerate(zip(one.blocks, other.blocks, strict=False)) if a != b),
        min(len(one.blocks), len(other.blocks)),
    )


def test_a_longer_conversation_begins_with_the_blocks_of_the_shorter() -> None:
    turns = [{"role": "system", "content": LONG}, {"role": "user", "content": "Hi"}]
    first = of({"model": "m", "messages": turns, "max_tokens": 9})
    second = of({"messages": [*turns, {"role": "assistant", "content": "Hello"}], "temperature": 0, "model": "m"})
    assert len(first.blocks) > 20
    assert shared(first, second) == len(first.blocks)
    assert len(second.blocks) > len(first.blocks) or shared(first, second) == len(second.blocks)


def test_tools_come_before_messages() -> None:
    one = of({"model": "m", "tools": [{"name": LONG}], "messages": [{"role": "user", "content": "a"}]})
    other = of({"model": "m", "tools": [{"name": LONG}], "messages": [{"role": "user", "content": "b"}]})
    assert shared(one, other) >= len(LONG) // 64


@pytest.mark.parametrize("field", ["model", "cache_salt"])
def test_another_model_and_another_salt_share_nothing(field: str) -> None:
    fields = {"model": "m", "prompt": LONG}
    assert shared(of(fields), of({**fields, field: "other"})) == 0


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": LONG},
        {"prompt": [LONG, "more"]},
        {"input": LONG, "instructions": "x"},
        {"system": "x", "messages": [{"role": "user", "content": [{"type": "text", "text": LONG}]}]},
    ],
)
def test_every_api_has_blocks_and_a_length(fields: dict[str, object]) -> None:
    prompt = of({"model": "m", **fields})
    assert len(prompt.blocks) >= len(LONG) // 64
    assert len(LONG) // 4 <= prompt.num_tokens <= len(LONG) // 4 + 40


def test_token_ids_are_counted() -> None:
    prompt = of({"prompt": list(range(1000, 1500))})
    assert prompt.num_tokens == 500
    assert len(prompt.blocks) * prompt.block_tokens == pytest.approx(500, rel=0.05)


def test_the_expected_output_is_bounded_by_the_limit() -> None:
    assert of({"prompt": "x", "max_tokens": 7}).expected_tokens == 7
    assert of({"prompt": "x", "max_completion_tokens": 10**9}).expected_tokens == TYPICAL_OUTPUT
    assert of({"prompt": "x", "max_tokens": -4}).expected_tokens == 1
    assert of({"prompt": "x", "n": 3}).num_choices == 3
    assert of({"prompt": "x", "n": 10**30}).num_choices == 128


@given(
    st.binary(max_size=400)
    | st.recursive(
        st.none() | st.integers() | st.text(),
        lambda each: (
            st.lists(each)
            | st.dictionaries(
                st.sampled_from(["model", "messages", "prompt", "input", "n", "max_tokens", "tools", "cache_salt", "x"]), each
            )
        ),
    ).map(lambda each: json.dumps(each).encode())
)
def test_nonsense_is_a_prompt_without_an_error(body: bytes) -> None:
    prompt = prompt_of(body, 16, 4)
    assert prompt.num_tokens >= 1
    assert 1 <= prompt.num_choices <= 128
    assert 1 <= prompt.expected_tokens <= TYPICAL_OUTPUT


def test_deep_nesting_is_a_prompt_without_an_error() -> None:
    body = b'{"messages":' + b"[" * 5000 + b"]" * 5000 + b"}"
    assert prompt_of(body, 64, 4).num_tokens >= 1
