"""`pdmesh rollout`: shows and sets which share of a model's new requests goes to which revision of its workers, or shifts them to
one revision in steps, and back when requests fail there."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from google.protobuf.json_format import MessageToJson

from pdmesh.client.client import Client
from pdmesh.commands.options import Connection, flat
from pdmesh.v1 import mesh_pb2

UNNAMED = "-"
"""What the command calls workers that name no revision."""

PARTS = 10_000
"""Sum of the weights that steps set: a step may be a hundredth of a percent."""
CHECK_S = 1.0


@dataclass(frozen=True)
class Options:
    """Share new requests between revisions of workers: pdmesh rollout blue=90 green=10, pdmesh rollout --to green."""

    weights: tuple[str, ...] = field(
        default=(),
        metadata={
            "help": "REVISION=WEIGHT of each (-: workers that name none), also as bare words; empty: show",
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
        if not revision or not equals or not number.isdecimal():
            raise ValueError(f"weights: {share[:80]!r} is not REVISION=WEIGHT with a whole number, such as green=10")
        name = "" if revision == UNNAMED else revision
        if name in weights:
            raise ValueError(f"weights: {revision[:80]!r} is named twice")
        weights[name] = int(number)
    return weights


def run(options: Options) -> int:
    """Run the command; return 0 when it is done, 1 when a rollout went back."""
    with options.connection.client() as client:
        if options.to:
            return Rollout(client, options).run()
        if options.weights or options.clear:
            timeout = options.connection.timeout
            shown = [client.split_traffic(parse(options.weights), model=options.model, timeout=timeout)]
        else:
            status = client.status(timeout=options.connection.timeout)
            shown = [split for split in status.splits if options.model in ("", split.model)]
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
    part = f"{share.weight / total:.4g}".rstrip(".") if total else "-"
    told = f"{share.revision or UNNAMED}: share {part}, {share.num_prefill_workers} prefill, {share.num_decode_workers} decode"
    told += f", {share.num_running} running, {share.num_failed} of {share.num_ended} failed"
    if share.ttft_ms:
        told += f", TTFT {share.ttft_ms:.0f} ms"
    if share.tpot_ms:
        told += f", TPOT {share.tpot_ms:.1f} ms"
    return told + (f", {share.num_ejected} ejected" if share.num_ejected else "")


class Rollout:
    """Shift new requests to one revision, step by step.

    set a share ─► watch it for hold_s ─► the next share
                        └─ requests fail there, or its workers are ejected or gone ─► the shares that were before
    """

    def __init__(self, client: Client, options: Options, sleep: Callable[[float], None] = time.sleep) -> None:
        self._client = client
        self._options = options
        self._sleep = sleep

    def run(self) -> int:
        """Return 0 when the last step is reached, 1 when it went back. Raises ValueError where the revision has no workers."""
        options, before = self._options, self._split()
        if not _of(before, options.to).num_decode_workers:
            known = ", ".join(share.revision for share in before.revisions if share.revision and share.num_decode_workers)
            raise ValueError(f"to: no decode worker has revision {options.to!r}; there are: {known or 'none'}")
        for number, percent in enumerate(options.steps, start=1):
            self._set(stepped(before, options.to, percent))
            print(f"{options.to}: {percent:g} % of new requests to {before.model}", flush=True)
            problem = self._watch(options.hold_s if number < len(options.steps) else 0.0)
            if problem:
                self._set({share.revision: share.weight for share in before.revisions if share.weight} if before.is_set else {})
                print(f"{options.to}: {problem}: new requests go where they went before", file=sys.stderr)
                return 1
        return 0

    def _watch(self, hold_s: float) -> str:
        """Return why to go back, empty when the time is over without a reason."""
        began, until = _of(self._split(), self._options.to), time.monotonic() + hold_s
        while True:
            now = _of(self._split(), self._options.to)
            if problem := wrong(began, now, self._options.max_failed):
                return problem
            if (left_s := until - time.monotonic()) <= 0:
                return ""
            self._sleep(min(CHECK_S, left_s))

    def _set(self, weights: Mapping[str, int]) -> None:
        self._client.split_traffic(weights, model=self._options.model, timeout=self._options.connection.timeout)

    def _split(self) -> mesh_pb2.TrafficSplit:
        status = self._client.status(timeout=self._options.connection.timeout)
        found = [split for split in status.splits if self._options.model in ("", split.model)]
        if len(found) != 1:
            models = ", ".join(split.model for split in found) or "none whose workers name a revision"
            raise ValueError(f"model: name one; there are: {models}")
        return found[0]


def stepped(before: mesh_pb2.TrafficSplit, to: str, percent: float) -> dict[str, int]:
    """Return weights with `percent` for one revision; the others keep theirs relative to each other, or get them by their decode
    workers where nothing was split. Pure."""
    mine = round(PARTS * percent / 100)
    others = {
        share.revision: share.weight if before.is_set else share.num_decode_workers
        for share in before.revisions
        if share.revision != to
    }
    total = sum(others.values())
    weights = {revision: round((PARTS - mine) * weight / total) if total else 0 for revision, weight in others.items()}
    return {**weights, to: max(1, mine)}


def wrong(began: mesh_pb2.RevisionShare, now: mesh_pb2.RevisionShare, max_failed: float) -> str:
    """Return what is wrong with a revision since a step began, in words; empty: nothing. Pure."""
    num_ended, num_failed = now.num_ended - began.num_ended, now.num_failed - began.num_failed
    if now.num_ended < began.num_ended:
        num_ended, num_failed = now.num_ended, now.num_failed  # another router process
    if not now.num_decode_workers:
        return "it has no decode worker any more"
    if now.num_ejected > began.num_ejected:
        return f"{now.num_ejected} of its workers are ejected since requests fail there"
    if num_failed and num_failed > max_failed * num_ended:
        return f"{num_failed} of its {num_ended} requests failed"
    return ""


def _of(split: mesh_pb2.TrafficSplit, revision: str) -> mesh_pb2.RevisionShare:
    found = (share for share in split.revisions if share.revision == revision)
    return next(found, mesh_pb2.RevisionShare(revision=revision))
