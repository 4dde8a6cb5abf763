"""Clients that never stop asking: streams through the client library, each compared with the answer that it has to give."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import random
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from pdmesh.client.client import AsyncClient, Completed, Delta
from pdmesh.client.stream import AsyncStream
from pdmesh.client.types import Tool
from pdmesh.engine.sampling.counter_rng import gumbel
from pdmesh.errors import MeshError
from pdmesh.launcher.mesh import LocalMesh
from pdmesh.launcher.plan import LocalMeshConfig
from pdmesh.runtime.rpc.tls import TlsConfig
from pdmesh.sampling_params import SamplingParams
from tests.chaos.record import Answer, Tally
from tests.mesh import oracle

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Requests whose answers are known: drawn with a seed, answered once by an engine that nothing is separated from.


_BATCH = 8  # requests that the engine computes together: more would not fit into its pool


@dataclass(frozen=True)
class Sizes:
    """Bounds, inclusive: tokens of a prompt and of each choice; `first_id` and `last_id` of what prompts are made of."""

    prompt: tuple[int, int]
    output: tuple[int, int]
    first_id: int
    last_id: int


@dataclass(frozen=True)
class Job:
    """A request, and the token ids of each choice of its answer. `more`: what it asks beyond `sampling`: it may end early."""

    prompt: tuple[int, ...]
    sampling: SamplingParams
    expected: tuple[tuple[int, ...], ...] = ()
    messages: tuple[tuple[str, str], ...] = ()  # in place of a prompt
    more: dict[str, Any] = field(default_factory=dict)  # a grammar, or a tool that must be called


def make_jobs(folder: Path, sizes: Sizes, seed: int, count: int, *, min_lead: float = 0.0) -> list[Job]:
    """`count` jobs for the model in `folder`; greedy ones, sampled ones, and some of two choices. With `min_lead` (nats), answers
    are those of float32, and only of jobs whose every token led the next candidate by so much: every engine gives them."""
    rng, weights = random.Random(seed), oracle.FLOAT32 if min_lead else oracle.DEFAULT
    jobs: list[Job] = []
    while len(jobs) < count:
        drawn = [_draw(rng, sizes) for _ in range(_BATCH)]
        answered = zip(drawn, _answers(folder, drawn, weights), strict=True)
        found = [replace(job, expected=tuple(map(tuple, answer))) for job, answer in answered]
        jobs += [job for job in found if not min_lead or lead(folder, job) >= min_lead]
    return jobs[:count]


def _draw(rng: random.Random, sizes: Sizes) -> Job:
    prompt = tuple(rng.randint(sizes.first_id, sizes.last_id) for _ in range(rng.randint(*sizes.prompt)))
    sampling = SamplingParams(
        temperature=rng.choice((0.0, 0.7, 1.0)),
        seed=rng.randint(1, 2**32),
        max_tokens=rng.randint(*sizes.output),
        ignore_eos=True,
        n=rng.choice((1, 1, 1, 1, 1, 2)),
    )
    return Job(prompt, sampling)


def _answers(folder: Path, jobs: Sequence[Job], weights: tuple[str, str]) -> list[list[list[int]]]:
    return oracle.answers(folder, [(job.prompt, job.sampling) for job in jobs], weights)


@lru_cache(maxsize=1)
def _reference(folder: Path) -> PreTrainedModel:
    from transformers import AutoModelForCausalLM

    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model


def lead(folder: Path, job: Job) -> float:
    """The least by which a token of the job's answer led the next candidate, in nats of transformers' float32 distribution, each
    candidate with the noise that it got; negative where another token should have been drawn."""
    return min(_lead(_reference(folder), job, choice, answer) for choice, answer in enumerate(job.expected))


@torch.inference_mode()
def _lead(model: PreTrainedModel, job: Job, choice: int, answer: Sequence[int]) -> float:
    logits = model(torch.tensor([[*job.prompt, *answer]])).logits[0, len(job.prompt) - 1 : -1]
    candidates, least = torch.arange(logits.shape[1]), math.inf
    for index, (token, scores) in enumerate(zip(answer, logits, strict=True)):
        if temperature := job.sampling.temperature:
            scores = scores + temperature * gumbel(job.sampling.seed, choice, index, candidates)
        others = scores[candidates != token]
        least = min(least, float(scores[token] - others.max()))
    return least


async def guided_jobs(folder: Path, seed: int, count: int, flags: Sequence[str]) -> list[Job]:
    """`count` jobs whose answers are held to a grammar, or are calls of a tool. What is right is what a mesh of one worker says
    with these flags that computes its prompts itself, without speculation. Few tokens fit a grammar: whether two of them are so
    near to each other that the order of a sum decides is not looked for."""
    rng = random.Random(f"guided {seed}")
    drawn = [_draw_guided(rng, number) for number in range(count)]
    config = LocalMeshConfig(
        model=str(folder), num_prefill=0, num_decode=0, num_both=1, num_routers=1, num_threads=1, port=0, restart=False,
        worker_args=("--kv-memory-mb", "32", *flags, "--speculation", "none"),
    )  # fmt: skip
    async with LocalMesh(config) as mesh, AsyncClient(mesh.router_addresses) as client:
        return [replace(job, expected=await _answer_of(client, job)) for job in drawn]


def _draw_guided(rng: random.Random, number: int) -> Job:
    sampling = SamplingParams(temperature=rng.choice((0.0, 1.0)), seed=rng.randint(1, 2**32), max_tokens=48)
    prompt = tuple(rng.randint(1, 250) for _ in range(rng.randint(40, 200)))
    if number % 3 == 0:
        tools = [Tool("plan", "Plans a trip.", _schema(rng))]
        asked = (("user", f"Plan trip {rng.randrange(10**6)}."),)
        return Job((), sampling, messages=asked, more={"tools": tools, "tool_choice": "required", "parallel_tool_calls": False})
    if number % 3 == 1:
        return Job(
            prompt, sampling, more={"regex": rng.choice((r"[a-z]{5,30}", r"([0-9]{3}-){2,8}[0-9]", r"(yes|no)( (yes|no)){5,20}"))}
        )
    return Job(prompt, sampling, more={"json_schema": json.dumps(_schema(rng))})


def _schema(rng: random.Random) -> dict[str, Any]:
    fields = {f"field{number}": {"type": "string", "maxLength": 8} for number in range(rng.randint(1, 3))}
    return {"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False}


async def _answer_of(client: AsyncClient, job: Job) -> tuple[tuple[int, ...], ...]:
    tokens: list[list[int]] = [[] for _ in range(job.sampling.n)]
    async with stream_of(client, job, {**_options_of(job), "mode": "local"}) as stream:
        async for event in stream:
            if isinstance(event, Delta):
                tokens[event.choice] += event.token_ids
    return tuple(map(tuple, tokens))


def stream_of(client: AsyncClient, job: Job, options: dict[str, Any]) -> AsyncStream:
    """The job's request."""
    if job.messages:
        return client.chat_stream(list(job.messages), timeout=REQUEST_TIMEOUT_S, **options)
    return client.generate_stream(list(job.prompt), timeout=REQUEST_TIMEOUT_S, **options)


def _options_of(job: Job) -> dict[str, Any]:
    sampling = job.sampling
    return {
        "temperature": sampling.temperature,
        "seed": sampling.seed,
        "max_tokens": sampling.max_tokens,
        "ignore_eos": not job.more,
        "n": sampling.n,
        **job.more,
    }


REQUEST_TIMEOUT_S = 90.0
LONG_WAIT_S = 0.1
_LEAVES = 0.05  # share of clients that close their stream in the middle
SHARES_CACHE = 0.2
"""Share of requests that may find their prompt in the caches; all others have a salt of their own."""
_MODES = ("remote", "remote", "remote", "", "local")
_PAUSE_S = 0.02  # between two requests of a client


class Load:
    """`num_clients` clients, each with one request at a time. `tally` counts since the last `take_tally`. Without
    `choices_handed_over`, how a request of several choices is computed is left to the router."""

    def __init__(
        self,
        routers: Sequence[str],
        jobs: Sequence[Job],
        *,
        seed: int,
        num_clients: int,
        choices_handed_over: bool = True,
        shares_cache: float = SHARES_CACHE,
        tls: TlsConfig | None = None,
    ) -> None:
        self._routers, self._tls = routers, tls
        self._jobs = jobs
        self._rng = random.Random(seed)
        self._num_clients = num_clients
        self._choices_handed_over = choices_handed_over
        self._shares_cache = shares_cache
        self._tally = Tally()

    def take_tally(self) -> Tally:
        """The counts so far, which begin anew."""
        tally, self._tally = self._tally, Tally()
        return tally

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Clients ask within the block; leaving it waits until the last stream has ended."""
        stop = asyncio.Event()
        tasks = [asyncio.create_task(self._ask_until(stop, number)) for number in range(self._num_clients)]
        try:
            yield
        finally:
            stop.set()
            await asyncio.gather(*tasks)

    async def _ask_until(self, stop: asyncio.Event, number: int) -> None:
        """A client of its own, which prefers the router of its number."""
        first = number % len(self._routers)
        async with AsyncClient([*self._routers[first:], *self._routers[:first]], tls=self._tls) as client:
            while not stop.is_set():
                await self._ask(client, self._rng.choice(self._jobs))
                await asyncio.sleep(_PAUSE_S)

    async def _ask(self, client: AsyncClient, job: Job) -> None:
        answer = Answer(job.expected)
        leaves_after = self._rng.randint(0, job.sampling.max_tokens) if self._rng.random() < _LEAVES else None
        try:
            async with stream_of(client, job, self._options(job)) as stream:
                await self._follow(stream, answer, leaves_after)
        except MeshError as error:
            self._tally.errors.append(f"{type(error).__name__} after {answer.num_tokens} tokens: {error.message}")
        self._tally.count(answer)

    async def _follow(self, stream: AsyncStream, answer: Answer, leaves_after: int | None) -> None:
        last = time.monotonic()
        async for event in stream:
            if isinstance(event, Delta):
                answer.take(event.choice, event.first_index, event.token_ids)
                last = self._waited_since(last)
            elif isinstance(event, Completed):
                answer.end()
                self._tally.num_resumes += event.num_resumes
                self._tally.num_resubmissions += event.timings.num_resubmissions
                self._tally.num_retries += event.timings.num_retries
                self._tally.transports[event.timings.transport] += 1
            if leaves_after is not None and answer.num_tokens >= leaves_after:
                self._tally.num_left += 1
                return

    def _waited_since(self, last: float) -> float:
        now = time.monotonic()
        if now - last > LONG_WAIT_S:
            self._tally.waits.append((last, now))
        return now

    def _options(self, job: Job) -> dict[str, Any]:
        sampling, options = job.sampling, _options_of(job)
        if self._rng.random() >= self._shares_cache:
            options["cache_salt"] = secrets.token_hex(8)
        mode = self._rng.choice(_MODES)
        if mode and (sampling.n == 1 or self._choices_handed_over):
            options["mode"] = mode
        return options
