"""What the halves of the plugin share within one process: the connector's halves, the draw, and the engine around EngineCore.

vLLM makes the connector and the logits processor itself, from names in its configuration; they find their engine here. Only the
engine's thread uses a link, and, while that waits for a step of several ranks, the threads of these (ranks/server.py).

    schedule()     ── asks ──► waits_for_kv, outcomes; tells asked, granted, plan    (scheduler half)
    the forward    ── tells ─► announce                                            (worker half)
    the sampler    ── asks ──► the draws of the step's rows                        (logits processor)
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

LINK, RANKS = "pdmesh_link", "pdmesh_ranks"
"""The keys of `kv_connector_extra_config` under which the name of a link stands, and the socket for ranks in other processes."""


@dataclass
class Outcomes:
    """Hold what the connector reports at the end of the next step, each once: vLLM keeps a request's blocks until then."""

    received: set[str] = field(default_factory=set)
    sent: set[str] = field(default_factory=set)

    def __bool__(self) -> bool:
        return bool(self.received or self.sent)


class Draws(Protocol):
    """Draw the tokens of a step."""

    def draw(self, logits: Tensor, names: Sequence[str | None]) -> Sequence[int]:
        """Return a token for each row of `logits` [R, V] float32; `names` are the requests' ids in vLLM."""


class WorkerLink(Protocol):
    """What the connector's worker half and the logits processor need, in whichever process they are."""

    @property
    def draws(self) -> Draws | None: ...

    def register(self, caches: Mapping[str, Tensor]) -> None:
        """Take vLLM's KV tensors, by layer, in its order."""

    def announce(self, layer: str, step: int) -> None:
        """Tell that a layer of the step is in the KV tensors; unless it has no KV of its own."""


class Link:
    """Connect one EngineCore with the engine around it. The functions are set before the first step."""

    def __init__(self) -> None:
        self.caches: Mapping[str, Tensor] = {}  # vLLM's KV tensors, by layer, in its order
        self.outcomes = Outcomes()
        self.waits_for_kv: set[str] = set()  # requests whose prompt is filled by a transfer
        self.holds_blocks: set[str] = set()  # requests whose blocks stay after their end, until they are in outcomes.sent
        self.on_granted: Callable[[str, Sequence[int], int], None] = lambda name, blocks, num_external: None
        self.on_asked: Callable[[str], None] = lambda name: None
        self.on_plan: Callable[[SchedulerOutput], None] = lambda plan: None
        self.layer_done: Callable[[int], None] = lambda index: None
        self.is_awaited: Callable[[], bool] = lambda: False  # whether the layers of the planned step are read
        self.draws: Draws | None = None
        self._layers: dict[str, int] = {}
        self._step = 0
        self._stepping = threading.Lock()

    def register(self, caches: Mapping[str, Tensor]) -> None:
        """Take vLLM's KV tensors."""
        self.caches = caches
        self._layers = {name: index for index, name in enumerate(caches)}

    def announce(self, layer: str, step: int) -> None:
        """Tell the engine that a layer of the running step is in the KV tensors."""
        if (index := self._layers.get(layer)) is not None:
            self.layer_done(index)

    def begin_step(self, plan: SchedulerOutput) -> int:
        """Tell the engine of a planned step; return its number. What is said of a step before it is not heard any more."""
        with self._stepping:
            self._step += 1
        self.on_plan(plan)
        return self._step

    @contextmanager
    def in_step(self, step: int) -> Iterator[bool]:
        """Yield whether that step runs, or has just run; no other one begins within the block."""
        with self._stepping:
            yield step == self._step

    def take_outcomes(self) -> Outcomes:
        """Return what is to be reported, once."""
        outcomes, self.outcomes = self.outcomes, Outcomes()
        return outcomes


_LINKS: dict[str, Link] = {}
_WORKER_LINKS: dict[str, WorkerLink] = {}


def open_link(name: str) -> Link:
    """Make the link of a new engine."""
    _LINKS[name] = link = Link()
    return link


def link_of(extra_config: Mapping[str, object]) -> Link:
    """Return the link that a configuration names, for the scheduler half. Raises ValueError: the plugin works in a pdmesh worker
    only."""
    link = _LINKS.get(str(extra_config.get(LINK)))
    if link is None:
        raise ValueError(
            f"kv_connector_extra_config.{LINK}: no engine of pdmesh in this process has that name; start vLLM by "
            "`python -m pdmesh.worker --engine vllm`"
        )
    return link


def worker_link_of(extra_config: Mapping[str, object]) -> WorkerLink:
    """Return the link for the worker half and the draw: the engine's own, or in the process of a rank one over a socket. Raises
    what `link_of` raises."""
    address = extra_config.get(RANKS)
    if address is None:
        return link_of(extra_config)
    from pdmesh_vllm.ranks.link import connect

    return _WORKER_LINKS.get(str(address)) or _WORKER_LINKS.setdefault(str(address), connect(str(address)))


def close_link(name: str) -> None:
    """Forget a link; idempotent."""
    _LINKS.pop(name, None)
