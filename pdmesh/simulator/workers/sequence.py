"""A request on one modelled worker: what is known of its tokens, and what it holds there."""

from __future__ import annotations

from typing import Protocol


class Watcher(Protocol):
    """Who is told of tokens, at the end of the step that drew them. It may ask workers for something by events only."""

    def on_prompt(self, sequence: Sequence, at_s: float) -> None:
        """The prompt is computed, its next token is drawn. With `num_left` 0 that was the last."""

    def on_end(self, sequence: Sequence, at_s: float) -> None:
        """A row has drawn its last token; the worker has forgotten it."""


class Sequence:
    """`num_tokens` have to be computed before it draws its next token; `num_left` it is yet to draw here.

    `watcher` is told of its tokens, `tag` is the caller's. `goal_s`: its TPOT objective, 0 without one. `hashes` name the
    prompt's full prefix blocks in order. `prefill_only`: it ends with its first token, and its blocks stay until somebody lets go
    of them. What `KvRoom`, `Rows` and `Paces` keep here is theirs.
    """

    __slots__ = (
        "compute_s", "end_step", "entry_step", "goal_s", "hashes", "num_blocks", "num_cached", "num_computed", "num_left",
        "num_tokens", "pace_key", "prefill_only", "shared", "tag", "turn", "was_preempted", "watcher", "where",
    )  # fmt: skip

    def __init__(
        self,
        watcher: Watcher,
        tag: object,
        num_tokens: int,
        num_left: int,
        *,
        goal_s: float = 0.0,
        hashes: tuple[int, ...] = (),
        prefill_only: bool = False,
    ) -> None:
        self.watcher = watcher
        self.tag, self.num_tokens, self.num_left, self.goal_s, self.hashes = tag, num_tokens, num_left, goal_s, hashes
        self.prefill_only = prefill_only
        self.where = ""  # the worker that it is on
        self.turn = 0  # its place in the order of arrival
        self.num_computed = self.num_cached = 0
        self.compute_s = 0.0  # of steps that held some of its prompt
        self.num_blocks = 0  # of its own
        self.shared: list[int] = []  # prefix blocks that it has pinned
        self.entry_step = 0
        self.end_step: int | None = None  # while it decodes
        self.pace_key: float | None = None
        self.was_preempted = False

    @property
    def num_remaining(self) -> int:
        """Tokens of the prompt that are still to be computed."""
        return self.num_tokens - self.num_computed
