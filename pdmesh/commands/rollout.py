"""`pdmesh rollout`: shows and sets which share of a model's new requests goes to which revision of its workers, or shifts them to
one revision in steps, and back when requests fail there."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from google.protobuf.json_format import MessageToJson

from pdmesh.client.client import Client
from pdmesh.commands.options import Connection, flat
from pdmesh.errors import FailedPrecondition, InvalidArgument, MeshError
from pdmesh.runtime.registry.records import MAX_REVISION_WEIGHT, NO_REVISION
from pdmesh.v1 import mesh_pb2

PARTS = 10_000
"""Sum of the weights that steps set: a step may be a hundredth of a percent."""

CHECK_S = 1.0
FEWEST_FAILED = 2
"""One request that failed says nothing yet."""
NUM_TRIES_BACK, RETRY_S = 5, 2.0
STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
WENT_BACK, OVERTAKEN = 3, 4
"""Exit codes of a rollout that went back, and of one that stopped since another split was set meanwhile."""
NUM_OTHER = 3
"""Looks in a row that show another split than was set: processes of a router hear of a new one within a second or two."""


@dataclass(frozen=True)
class Options:
    """Share new requests between revisions of workers: pdmesh rollout blue=90 green=10, pdmesh rollout --to green."""

    weights: tuple[str, ...] = field(
        default=(),
        metadata={
            "help": f"REVISION=WEIGHT of each ({NO_REVISION}: workers without one), also as bare words; empty: show",
            "positional": True,
        },
    )
    to: str = field(default="", metadata={"help": "revision to which new requests are shifted in steps"})
    steps: tuple[float, ...] = field(default=(5.0, 25.0, 50.0, 100.0), metadata={"help": "with --to: its share at each, percent"})
    hold_s: float = field(default=60.0, metadata={"help": "with --to: how long each step but the last lasts"})
    max_failed: float = field(
        default=0.01, metadata={"help": "with --to: share of its requests that may fail in a step; more: back to what was"}
    )
    clear: bool = field(default=False, metadata={"help": "end the split: the policy chooses among all workers"})
    model: str = field(default="", metadata={"help": "model of the workers; empty while the mesh serves exactly one"})
    json: bool = field(default=False, metadata={"help": "write JSON"})
    connection: Connection = field(default_factory=Connection, metadata=flat())

    def validate(self) -> None:
        """Raise ValueError that names the field."""
        if sum((bool(self.weights), bool(self.to), self.clear)) > 1:
            raise ValueError("weights, to and clear: give one of them")
        parse(self.weights)
        rising = (0.0, *self.steps)
        if not self.steps or any(a >= b for a, b in zip(rising, self.steps, strict=False)) or self.steps[-1] > 100:
            raise ValueError("steps: must rise, from above 0 to 100 at most, such as 5,25,50,100")
        if not 0 <= self.hold_s <= 86_400:
            raise ValueError("hold_s: must be between 0 and 86400 seconds")
        if not 0 <= self.max_failed <= 1:
            raise ValueError("max_failed: must be between 0 and 1")


def parse(shares: tuple[str, ...]) -> dict[str, int]:
    """Return weights by revision. Raises ValueError."""
    weights = dict[str, int]()
    for share in shares:
        revision, equals, number = share.partition("=")
        if not revision or not equals or not number.isdecimal() or int(number[:9]) > MAX_REVISION_WEIGHT or len(number) > 9:
            raise ValueError(f"weights: {share[:80]!r} is not REVISION=WEIGHT with a whole number up to {MAX_REVISION_WEIGHT}")
        if named(revision) in weights:
            raise ValueError(f"weights: {revision[:80]!r} is named twice")
        weights[named(revision)] = int(number)
    return weights


def named(revision: str) -> str:
    """Return the revision as messages have it."""
    return "" if revision == NO_REVISION else revision


def run(options: Options) -> int:
    """Run the command; return 0 when it is done, WENT_BACK or OVERTAKEN where a rollout ended early."""
    timeout = options.connection.timeout
    with options.connection.client() as client:
        if options.to:
            for number in STOPPING:
                signal.signal(number, signal.default_int_handler)  # to go back
            return Rollout(client, options).run()
        if options.weights or options.clear:
            shown = [client.split_traffic(parse(options.weights), model=options.model, timeout=timeout)]
        else:
            shown = [each for each in client.status(timeout=timeout).splits if options.model in ("", each.model)]
    if options.json:
        print("\n".join(MessageToJson(split, always_print_fields_with_no_presence=True) for split in shown))
    else:
        print("\n".join(map(in_words, shown)) or "no worker names a revision (--revision), and nothing is split")
    return 0


def in_words(split: mesh_pb2.TrafficSplit) -> str:
    """Return the split in lines."""
    total = sum(share.weight for share in split.revisions)
    head = f"{split.model}: " + ("new requests by weight" if split.is_set else "no split: the policy chooses among all workers")
    return "\n".join((head, *(f"  {_share(each, total)}" for each in split.revisions)))


def _share(share: mesh_pb2.RevisionShare, total: int) -> str:
    part = f"{share.weight / total:.4g}" if total else "-"
    told = (
        f"{share.revision or NO_REVISION}: share {part}, {share.num_prefill_workers} prefill, {share.num_decode_workers} decode"
    )
    told += f", {share.num_running} running, {share.num_failed} of {share.num_ended} failed, {share.num_lost} tried again"
    if share.ttft_ms:
        told += f", TTFT {share.ttft_ms:.0f} ms"
    if share.tpot_ms:
        told += f", TPOT {share.tpot_ms:.1f} ms"
    return told + (f", {share.num_ejected} ejected" if share.num_ejected else "")


class Rollout:
    """Shift new requests to one revision, step by step.

    set a share ─► watch it for hold_s ─► the next share
                        ├─ requests fail there, its workers are ejected or gone, or somebody stops this ─► what was before
                        └─ somebody sets another split ─► that stays
    """

    def __init__(self, client: Client, options: Options, sleep: Callable[[float], None] = time.sleep) -> None:
        self._client = client
        self._options = options
        self._sleep = sleep
        self._to, self._model = named(options.to), options.model
        self._latest: dict[int, mesh_pb2.TrafficSplit] = {}  # by the process of a router that said so, which counts for itself
        self._weights: Mapping[str, int] = {}  # as set last

    def run(self) -> int:
        """Return 0 when the last step is reached, WENT_BACK when it went back, OVERTAKEN where another split was set. Raises
        MeshError where it could not begin."""
        options, before = self._options, self._look()
        if not _of(before, self._to).num_decode_workers:
            there = ", ".join(share.revision or NO_REVISION for share in before.revisions if share.num_decode_workers)
            raise InvalidArgument("to", f"no decode worker has revision {options.to!r}; there are: {there or 'none'}")
        self._model = before.model
        steps = [percent for percent in options.steps if percent >= share_of(before, self._to)]
        if not steps:
            print(f"{options.to}: has {share_of(before, self._to):g} % of new requests to {before.model} already")
        try:
            for number, percent in enumerate(steps, start=1):
                self._set(stepped(before, self._to, percent))
                print(f"{options.to}: {percent:g} % of new requests to {before.model}", flush=True)
                problem = self._watch(options.hold_s if number < len(steps) else 0.0)
                if problem is None:
                    print(f"{options.to}: another split was set meanwhile, which stays; see pdmesh rollout", file=sys.stderr)
                    return OVERTAKEN
                if problem:
                    self._go_back(before, problem)
                    return WENT_BACK
        except MeshError as error:
            self._go_back(before, f"the router does not answer: {error.message}")
            return WENT_BACK
        except KeyboardInterrupt:
            self._go_back(before, "interrupted")
            return WENT_BACK
        except BaseException:
            self._go_back(before, "it cannot go on")
            raise
        return 0

    def _watch(self, hold_s: float) -> str | None:
        """Return why to go back; empty when the time is over without a reason; None where another split was set."""
        until, num_gone, num_other, bases = time.monotonic() + hold_s, 0, 0, dict(self._latest)
        while True:
            now = self._look()
            num_gone = 0 if _of(now, self._to).num_decode_workers else num_gone + 1
            num_other = 0 if _weights(now) == self._weights else num_other + 1
            if num_other == NUM_OTHER:
                return None
            if num_gone > 1:
                return "it has no decode worker any more"
            step = [(bases.setdefault(epoch, latest), latest) for epoch, latest in self._latest.items()]
            if problem := wrong(step, self._to, self._options.max_failed):
                return problem
            left_s = until - time.monotonic()
            if left_s <= 0 and not num_gone:
                if hold_s and not counted(step, [self._to]).num_asked:
                    print(f"{self._options.to}: no request ended there in this step", file=sys.stderr)
                return ""
            self._sleep(CHECK_S if num_gone else min(CHECK_S, left_s))

    def _go_back(self, before: mesh_pb2.TrafficSplit, problem: str) -> None:
        """Set what was before. Raises FailedPrecondition that says how, where the router does not take it."""
        for number in STOPPING:
            signal.signal(number, signal.SIG_IGN)
        weights = _weights(before) if before.is_set else {}
        spelled = " ".join(f"{name or NO_REVISION}={weight}" for name, weight in weights.items()) or "--clear"
        for left in reversed(range(NUM_TRIES_BACK)):
            try:
                self._set(weights)
            except MeshError as error:
                if not left:
                    text = f"{problem}, and going back failed: {error.message}; try: pdmesh rollout {spelled}"
                    raise FailedPrecondition("to", text) from error
                self._sleep(RETRY_S)
            else:
                print(f"{self._options.to}: {problem}: new requests go where they went before", file=sys.stderr)
                return

    def _set(self, weights: Mapping[str, int]) -> None:
        self._weights = {revision: weight for revision, weight in weights.items() if weight}
        self._client.split_traffic(weights, model=self._model, timeout=self._options.connection.timeout)

    def _look(self) -> mesh_pb2.TrafficSplit:
        status = self._client.status(timeout=self._options.connection.timeout)
        found = [split for split in status.splits if self._model in ("", split.model)]
        if len(found) != 1:
            there = ", ".join(split.model for split in found) or "none whose workers name a revision"
            raise InvalidArgument("model", f"name one; there are: {there}")
        self._latest[status.epoch] = found[0]
        return found[0]


def _weights(split: mesh_pb2.TrafficSplit) -> dict[str, int]:
    return {share.revision: share.weight for share in split.revisions if share.weight}


def share_of(split: mesh_pb2.TrafficSplit, revision: str) -> float:
    """Return the percentage that a revision has by weight; 0 where nothing is split."""
    total = sum(share.weight for share in split.revisions)
    return 100 * _of(split, revision).weight / total if total else 0.0


def stepped(before: mesh_pb2.TrafficSplit, to: str, percent: float) -> dict[str, int]:
    """Return weights with `percent` for one revision; the others keep theirs relative to each other, or get them by their decode
    workers where nothing was split. Pure."""
    mine = max(1, round(PARTS * percent / 100))
    others = {
        share.revision: share.weight if before.is_set else share.num_decode_workers
        for share in before.revisions
        if share.revision != to
    }
    total = sum(others.values())
    weights = {revision: round((PARTS - mine) * weight / total) if total else 0 for revision, weight in others.items()}
    return {**weights, to: mine}


Step = Sequence[tuple[mesh_pb2.TrafficSplit, mesh_pb2.TrafficSplit]]
"""What each process of a router said before a step, and last."""


def wrong(step: Step, to: str, max_failed: float) -> str:
    """Return what is wrong with a revision since the step began, in words; empty: nothing, or nothing that the other revisions
    have not as well. Pure."""
    mine = counted(step, [to])
    others = counted(step, sorted({share.revision for _, now in step for share in now.revisions} - {to}))
    for before, now in step:
        if (ejected := _of(now, to).num_ejected) > _of(before, to).num_ejected:
            return f"{ejected} of its workers are ejected since requests fail there"
    if mine.num_failed >= FEWEST_FAILED and mine.share > max(max_failed, others.share):
        return f"{mine.num_failed} of its {mine.num_asked} requests failed or were tried again elsewhere"
    return ""


class Counted(NamedTuple):
    """Count the requests that asked revisions in a step, and those of them that failed there."""

    num_asked: int
    num_failed: int

    @property
    def share(self) -> float:
        """Return the share that failed."""
        return self.num_failed / self.num_asked if self.num_asked else 0.0


def counted(step: Step, revisions: list[str]) -> Counted:
    """Return what was asked in a step, of these revisions together. Pure."""
    pairs = [(_of(before, revision), _of(now, revision)) for before, now in step for revision in revisions]
    num_lost = sum(b.num_lost - a.num_lost for a, b in pairs)
    num_ended = sum(b.num_ended - a.num_ended for a, b in pairs)
    num_failed = sum(b.num_failed - a.num_failed for a, b in pairs)
    return Counted(num_ended + num_lost, num_failed + num_lost)


def _of(split: mesh_pb2.TrafficSplit, revision: str) -> mesh_pb2.RevisionShare:
    found = (share for share in split.revisions if share.revision == revision)
    return next(found, mesh_pb2.RevisionShare(revision=revision))
