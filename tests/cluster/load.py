"""Requests through the real routers, for as long as something is done to the mesh behind them.

with Load(api_key, clients=2) as load:
    cluster.plane.kubectl("rollout", "restart", …)
load.assert_none_failed()
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from pdmesh.client.client import Client, Generation
from pdmesh.client.types import GenerateOptions
from pdmesh.errors import MeshError
from tests.cluster.cluster import ROUTER

_PROMPT = "The history of the city begins with a small harbour, in which ships of many countries met, and"
BURST = 6
"""Clients that ask all the time: more than one decode worker takes at once; a prefill worker computes one by one."""
SELDOM_S = 2.0
"""Pause of a client whose requests are to need no second worker."""

_PAUSE_S = 0.1
_PATIENT_MS = 60_000
_TIMEOUT_S = 90.0
_NUMBERS = itertools.count()
"""No prompt comes twice, whoever asks: none is found in a cache."""


@dataclass(frozen=True)
class Kind:
    """What is asked for: a prompt, and so many tokens of one request after another."""

    prompt: str
    lengths: tuple[int, ...]
    options: GenerateOptions


WRITING = Kind(_PROMPT, (8, 16, 8, 60), {})
"""Decode has most of the work, and with the long ones a worker that drains has something to hand over."""
_SENTENCES = 50
_MOST_SENTENCES = 200


def _reading(num_sentences: int) -> Kind:
    return Kind(" ".join([_PROMPT] * num_sentences), (2,), {"mode": "remote"})


def reading(api_key: str, wanted_s: float) -> Kind:
    """What keeps prefill busy and decode hardly: a prompt that takes this machine about so long, with nothing beside it."""
    kind = _reading(_SENTENCES)
    with Client(ROUTER, api_key=api_key) as client:
        took_s = min(_alone_s(client, kind) for _ in range(3))
    return _reading(max(1, min(_MOST_SENTENCES, round(_SENTENCES * wanted_s / took_s))))


def _alone_s(client: Client, kind: Kind) -> float:
    options: GenerateOptions = {"max_tokens": 2, "slo_ttft_ms": _PATIENT_MS, "slo_tpot_ms": _PATIENT_MS, **kind.options}
    began = time.monotonic()
    client.generate(f"{next(_NUMBERS)}. {kind.prompt}", timeout=_TIMEOUT_S, **options)
    return time.monotonic() - began


@dataclass(frozen=True)
class Outcome:
    """One request's."""

    error: str | None
    prefill_worker: str = ""
    decode_worker: str = ""


class Load:
    """A few clients, each with one request at a time. They find the routers by their Service's name and, unless
    told otherwise, try nothing again: what fails is seen."""

    def __init__(
        self,
        api_key: str,
        *,
        clients: int = 2,
        kind: Kind = WRITING,
        pause_s: float = _PAUSE_S,
        resume_s: float = 0.0,
        patient: bool = True,
    ) -> None:
        """`resume_s`: how long to look for another router when one goes. `patient`: each asks for
        no more than an answer; otherwise for what the mesh promises, and comes later when told to."""
        self._api_key = api_key
        self._kind, self._pause_s = kind, pause_s
        self._resume_s, self._patient = resume_s, patient
        self._places = itertools.count()
        self._stopping = threading.Event()
        self._threads = [threading.Thread(target=self._run, name=f"load {index}") for index in range(clients)]
        self.outcomes: list[Outcome] = []

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join()

    def wait_for_answers(self, count: int, timeout_s: float = 90) -> None:
        """Until so many more requests have come to their end. Raises AssertionError."""
        self.wait_until_answered(len(self.outcomes) + count, timeout_s)

    def wait_until_answered(self, total: int, timeout_s: float = 90) -> None:
        """Until so many requests have come to their end in all. Raises AssertionError."""
        deadline = time.monotonic() + timeout_s
        while len(self.outcomes) < total:
            assert time.monotonic() < deadline, f"not {total} requests ended within {timeout_s:.0f} s; {self.summary()}"
            time.sleep(0.1)

    def assert_none_failed(self, at_least: int = 1) -> None:
        """Every request got all of its tokens, and there were so many requests."""
        errors = Counter(outcome.error for outcome in self.outcomes if outcome.error)
        assert not errors, f"of {len(self.outcomes)} requests failed {dict(errors)}"
        assert len(self.outcomes) >= at_least, self.summary()

    def summary(self) -> str:
        """How many, and where they ran."""
        workers = Counter(outcome.decode_worker for outcome in self.outcomes)
        return f"{len(self.outcomes)} requests, on {dict(workers)}"

    def _run(self) -> None:
        with Client(ROUTER, api_key=self._api_key, resume_timeout_s=self._resume_s, retry_overload=not self._patient) as client:
            while not self._stopping.wait(self._pause_s):
                self.outcomes.append(self._ask(client, next(self._places)))

    def _ask(self, client: Client, place: int) -> Outcome:
        kind = self._kind
        wanted = kind.lengths[place % len(kind.lengths)]
        options: GenerateOptions = {"max_tokens": wanted, "ignore_eos": True, **kind.options}
        if self._patient:
            options |= {"slo_ttft_ms": _PATIENT_MS, "slo_tpot_ms": _PATIENT_MS}
        try:
            answer = client.generate(f"{next(_NUMBERS)}. {kind.prompt}", timeout=_TIMEOUT_S, **options)
        except MeshError as error:
            return Outcome(f"{type(error).__name__}: {error}")
        return _checked(answer, wanted)


def _checked(answer: Generation, wanted: int) -> Outcome:
    error = None
    if answer.usage.completion_tokens != wanted:
        error = f"{answer.usage.completion_tokens} tokens instead of {wanted}"
    return Outcome(error, answer.timings.prefill_worker, answer.timings.decode_worker)
