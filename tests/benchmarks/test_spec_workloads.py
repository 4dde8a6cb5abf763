"""The prompts and workloads of the speculation benchmark: always the same, all different, with the answers they ask for."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

import pytest

from benchmarks.spec.texts import chat, varied_prompts
from benchmarks.spec.workloads import (
    COPYING,
    FENCE,
    WORKLOADS,
    Task,
    copying,
    jobs,
    json_indent,
    json_lines,
    json_list,
    quotes,
    rename_attribute,
    rename_class,
)


def encode(text: str) -> list[int]:
    """Words, runs of spaces and other marks, like a tokenizer's."""
    return [hash(word) % 50_000 for word in re.findall(r"\w+|\s+|`+|[^\w\s`]", text)]


def test_two_hundred_different_prompts() -> None:
    prompts = varied_prompts()
    assert len(prompts) == len({prompt.text for prompt in prompts}) == 200
    assert len({prompt.kind for prompt in prompts}) >= 15
    lengths = sorted(len(encode(prompt.text)) for prompt in prompts)
    assert lengths[0] == 1
    assert 1_000 < lengths[-1] < 3_000
    assert sum(prompt.text.isascii() for prompt in prompts) < 190


def test_prompts_and_jobs_are_the_same_every_time() -> None:
    assert varied_prompts() == varied_prompts()
    assert varied_prompts() != varied_prompts(seed=9)
    for workload in WORKLOADS:
        assert jobs(workload, 16, encode) == jobs(workload, 32, encode)[:16]


@pytest.mark.parametrize("workload", WORKLOADS)
def test_jobs_of_a_batch_are_different_and_valid(workload: str) -> None:
    batch = jobs(workload, 36, encode)
    assert len({job.prompt for job in batch}) == 36
    for job in batch:
        job.params.validate()


def test_sampled_jobs_have_seeds_of_their_own() -> None:
    sampled = [job.params for job in jobs("prose", 32, encode) if not job.params.greedy]
    assert len(sampled) == 16
    assert len({params.seed for params in sampled}) == 16


def test_chat_alternates() -> None:
    assert chat("a", "b", "c") == (
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize("make", COPYING)
def test_most_of_an_answer_is_in_its_prompt(make: Callable[[int], Task]) -> None:
    for number in range(8):
        task = make(number)
        words = [word.strip("[],") for word in task.right.split()]
        assert sum(word in task.prompt for word in words) > 0.9 * len(words)


@pytest.mark.parametrize("number", range(8))
def test_answers_are_right(number: int) -> None:
    """The code compiles as the prompt's does; the JSON is the same value."""
    source = rename_class(number).prompt.rsplit("Before:\n\n```python\n", 1)[1].split(f"\n{FENCE}")[0]
    compile(source, "before", "exec")
    compile("class Store:" + rename_class(number).right, "after", "exec")
    assert "class Store:" + rename_class(number).right.rstrip("\n") == re.sub(
        r"\b" + source.split()[1][:-1] + r"\b", "Store", source
    )
    compile("class Keeper:" + rename_attribute(number).right, "after", "exec")

    given = [json.loads(line) for line in json_list(number).prompt.rsplit("```json\n", 2)[1].split(f"\n{FENCE}")[0].splitlines()]
    assert json.loads(json_list(number).right) == given
    assert [json.loads(line) for line in json_lines(number).right.splitlines()] == given
    assert json.loads(json_indent(number).right) == given


def test_an_answer_ends_at_its_fence() -> None:
    job = copying(0, encode)
    assert job.params.stop_token_ids == tuple(encode(FENCE))
    assert len(encode(job.right)) < job.params.max_tokens < 2 * len(encode(job.right))
    with pytest.raises(ValueError, match="3 tokens"):
        copying(0, lambda text: list(text.encode()))


def test_quotes_are_from_the_article() -> None:
    task = quotes(3)
    assert task.right.strip() in task.prompt
