"""Measures where the time of an engine's step goes: the stages of the CPU kernels, sampling, and Python around them. It needs no
mesh.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count, pairwise
from typing import Protocol

import torch
from torch import Tensor

from pdmesh.doctor.step_limits import Machine, Work, limits_of
from pdmesh.engine.config import EngineConfig
from pdmesh.engine.engine import Engine
from pdmesh.engine.kernels.cpu.library import Profile
from pdmesh.engine.kernels.cpu.model import NativeModel
from pdmesh.engine.loader.loader import load_model
from pdmesh.engine.request import EngineRequest
from pdmesh.engine.sampling.sampler import SampledToken, SampleRow
from pdmesh.sampling_params import SamplingParams
from pdmesh.text.block_hash import hash_block

SAMPLING, REST = "sampling", "between stages"
PYTHON = ("schedule", "batch", "postprocess")
"""The parts outside the native calls: planning the step; its tensors and draws; what it means for the sequences."""
_WARM_UP_STEPS = 3


@dataclass(frozen=True)
class Case:
    """Describe a kind of step: `num_seqs` sequences that decode after `context` tokens, or the whole prompt of one (`num_seqs`
    0)."""

    num_seqs: int
    context: int

    @property
    def name(self) -> str:
        return f"decode, batch {self.num_seqs}" if self.num_seqs else f"prefill, {self.context} tokens"

    @property
    def num_tokens(self) -> int:
        """Return the tokens of one step."""
        return self.num_seqs or self.context


@dataclass(frozen=True)
class StepProfile:
    """Hold a typical step. `parts`: nanoseconds, in the order of the computation; they add up to the wall time. `limits`: the
    least that this machine takes for a part, where it has a limit. `plain_ns`: a step of the same case without a clock inside."""

    case: Case
    parts: dict[str, int]
    limits: dict[str, int]
    plain_ns: int

    @property
    def wall_ns(self) -> int:
        return sum(self.parts.values())

    @property
    def python_share(self) -> float:
        """Return the share of the step outside the native calls."""
        return sum(self.parts[name] for name in PYTHON) / self.wall_ns

    @property
    def accounted_share(self) -> float:
        """Return how much of a step without a clock inside the named parts explain: all but what lies between the stages."""
        return (self.wall_ns - self.parts[REST]) / self.plain_ns

    @property
    def tokens_per_s(self) -> float:
        return self.case.num_tokens * 1e9 / self.wall_ns


class StepProfiler:
    """Profile the steps of an engine in this process."""

    def __init__(
        self, config: EngineConfig, cases: Sequence[Case], num_steps: int, say: Callable[[str], None] = lambda _text: None
    ) -> None:
        """Load the engine. `config` is a worker's; its pool and budget are enlarged for the cases, and speculation is off, so
        that steps match their case. `say` is called when the kernels are compiled.

        Raises ValueError for invalid settings, and for a model that the kernels do not compute.
        """
        self.cases, self._num_steps = cases, num_steps
        config = replace(_with_room(config, cases, num_steps), prefix_caching=False, speculation="none")
        loaded = load_model(config, lambda share, text: None if share else say(text))
        if not isinstance(loaded.model, NativeModel):
            raise ValueError(_why_not(getattr(loaded.model, "backend", "torch")))
        self._model = loaded.model
        self._sampler = _TimedSampler(loaded.model.sampler())
        self._model.sampler = lambda: self._sampler  # type: ignore[method-assign, assignment, return-value]  # this one's only
        self._engine = Engine(config, hash_block=hash_block, loaded=loaded)
        self._numbers = count()
        self._experts_read: list[Tensor] = []  # of each step of the case, [layers with experts]
        self._machine = Machine.measure(self._numbers_of_products(), self._numbers_of_attention(), self._model.num_threads)
        self.numeric_mode = loaded.numeric_mode

    def run(self, case: Case) -> StepProfile:
        """Run the case's steps, each followed by one without a clock inside; return the mean of those whose wall time is in the
        middle half, so that the parts add up."""
        self._experts_read = []
        pairs = list(self._decode(case) if case.num_seqs else self._prefill(case))
        samples, plain = [parts for parts, _ in pairs], sorted(ns for _, ns in pairs)
        samples.sort(key=lambda parts: sum(parts.values()))
        middle = samples[len(samples) // 4 : len(samples) - len(samples) // 4]
        parts = {name: sum(parts[name] for parts in middle) // len(middle) for name in middle[0]}
        plain = plain[len(plain) // 4 : len(plain) - len(plain) // 4]
        limits = limits_of(self._model, self._engine.kv.shape, self._work_of(case), self._machine)
        return StepProfile(case, parts, limits, sum(plain) // len(plain))

    def _numbers_of_products(self) -> str:
        """Return the numbers that are multiplied: int4 weights become int8."""
        kind = self._model.weights.head.format
        return {"int4": "int8", "wide bfloat16": "bfloat16"}.get(kind, kind)

    def _numbers_of_attention(self) -> str:
        """Return those of its products: a latent's int8 numbers become bfloat16."""
        dtype = str(self._engine.kv.shape.dtype).removeprefix("torch.")
        return {"int8": "bfloat16" if self._engine.model_config.latent else "int8 KV"}.get(dtype, dtype)

    def _work_of(self, case: Case) -> Work:
        work = Work.prefill(case.context)
        if case.num_seqs:
            work = Work.decode(case.num_seqs, case.context + _WARM_UP_STEPS + self._num_steps)
        if not self._experts_read:
            return work
        return replace(work, experts_read=tuple(torch.stack(self._experts_read).double().mean(0).tolist()))

    def _decode(self, case: Case) -> Iterator[tuple[dict[str, int], int]]:
        for _ in range(case.num_seqs):
            # Those that are computed first decode while the others are computed.
            self._add(case.context, _WARM_UP_STEPS + 2 * self._num_steps + case.num_seqs + 1)
        while self._engine.stats().num_waiting_tokens:
            self._engine.step()
        for _ in range(_WARM_UP_STEPS):
            self._engine.step()
        for _ in range(self._num_steps):
            yield self._step(), self._plain_step()
        self._finish()

    def _prefill(self, case: Case) -> Iterator[tuple[dict[str, int], int]]:
        for number in range(1 + max(4, self._num_steps // 8)):
            self._add(case.context, 1)
            parts = self._step()
            self._finish()
            self._add(case.context, 1)
            plain_ns = self._plain_step()
            self._finish()
            if number:  # the first warms up
                yield parts, plain_ns

    def _add(self, num_prompt_tokens: int, max_tokens: int) -> None:
        number = next(self._numbers)
        vocabulary = self._engine.model_config.vocab_size
        prompt = tuple((number * 7919 + position * 104_729) % vocabulary for position in range(num_prompt_tokens))
        sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        if not self._engine.add(EngineRequest(request_id=str(number), prompt=prompt, sampling=sampling)):
            raise AssertionError("the pool was made large enough")

    def _step(self) -> dict[str, int]:
        self._sampler.ns = 0
        counts = self._model.expert_counts()
        profile = self._model.profile = Profile()
        times = [time.perf_counter_ns()]
        if (step := self._engine.schedule_step()) is None:
            raise AssertionError("every case has work")
        times.append(time.perf_counter_ns())
        self._engine.run_step(step)
        times.append(time.perf_counter_ns())
        self._engine.postprocess_step(step)
        times.append(time.perf_counter_ns())
        schedule, compute, postprocess = (end - begin for begin, end in pairwise(times))
        self._model.profile = None
        if counts is not None and (now := self._model.expert_counts()) is not None:
            self._experts_read.append((now > counts).sum(1))
        stages = profile.nanoseconds()
        total = stages.pop("total")
        batch = compute - total - self._sampler.ns
        python = dict(zip(PYTHON, (schedule, batch, postprocess), strict=True))
        return {**stages, REST: total - sum(stages.values()), SAMPLING: self._sampler.ns, **python}

    def _plain_step(self) -> int:
        started = time.perf_counter_ns()
        self._engine.step()
        return time.perf_counter_ns() - started

    def _finish(self) -> None:
        while self._engine.has_work:
            self._engine.step()


def _why_not(backend: str) -> str:
    remedy = "see the warning above" if backend == "torch" else "give backend=native, which says why if it cannot"
    return f"backend: {backend} computes this model, whose steps have no stages to show; {remedy}"


class _Sampler(Protocol):
    def sample(self, logits: Tensor, rows: list[SampleRow]) -> list[SampledToken]: ...


class _TimedSampler:
    """Wrap a sampler, and count the nanoseconds that it took since `ns` was set to 0."""

    def __init__(self, sampler: _Sampler) -> None:
        self._sampler = sampler
        self.ns = 0

    def sample(self, logits: Tensor, rows: list[SampleRow]) -> list[SampledToken]:
        started = time.perf_counter_ns()
        drawn = self._sampler.sample(logits, rows)
        self.ns += time.perf_counter_ns() - started
        return drawn


def _with_room(config: EngineConfig, cases: Sequence[Case], num_steps: int) -> EngineConfig:
    """Return a config with a pool for the largest case, and a budget in which a prompt is one step."""
    tokens = [
        max(1, case.num_seqs) * (case.context + 2 * num_steps + _WARM_UP_STEPS + case.num_seqs + 2 * config.block_size)
        for case in cases
    ]
    return replace(
        config,
        num_blocks=max(tokens) // config.block_size + 1,
        kv_memory_mb=0,
        max_num_seqs=max(config.max_num_seqs, *(case.num_seqs for case in cases)),
        max_num_batched_tokens=max(config.max_num_batched_tokens, *(max(case.context, case.num_seqs) for case in cases)),
    )
