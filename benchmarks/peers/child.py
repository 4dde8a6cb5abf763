"""What every child process shares: JSON lines on stdin and stdout, whatever the library prints goes to stderr.

    start      python -m benchmarks.peers.children '{"library": …, "model": …, "threads": 2, "max_seqs": 32, …}'
    ready      {"ready": true, "about": {…}}
    request    {"op": "generate", "prompts": [[ids], …], "max_tokens": n}
    reply      {"seconds": s, "first_seconds": f | null, "token_ids": [[ids], …]} or {"error": text}

Runs under the peers' own Pythons, so nothing but the standard library is imported here. The end of stdin ends the child, and
so does the end of its parent: a paused child would not notice the former.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

PR_SET_PDEATHSIG = 1  # prctl(2)
Prompts = Sequence[Sequence[int]]
Options = dict[str, Any]


@dataclass(frozen=True)
class Answer:
    """Tokens per prompt; `first_seconds` is when the last prompt had its first token, where the library lets one see it."""

    token_ids: Sequence[Sequence[int]]
    first_seconds: float | None = None


@dataclass(frozen=True)
class Loaded:
    """A model that is ready: greedy, end of sequence ignored, exactly `max_tokens` tokens for each prompt."""

    generate: Callable[[Prompts, int], Answer]
    about: Options = field(default_factory=dict)


def serve(load: Callable[[Options], Loaded]) -> None:
    """Loads with the options of the command line, then answers requests until stdin ends."""

    def handler(options: Options) -> tuple[Options, Callable[[Options], Options]]:
        loaded = load(options)
        return loaded.about, lambda request: _answer(loaded, request)

    serve_requests(handler)


def serve_requests(load: Callable[[Options], tuple[Options, Callable[[Options], Options]]]) -> None:
    """The same for requests of any form: `load` gives what it is about, and what answers a request."""
    _die_with_parent()
    replies = _take_stdout()

    def reply(content: Options) -> None:
        replies.write(json.dumps(content) + "\n")
        replies.flush()

    about, answer = load(json.loads(sys.argv[1]))
    reply({"ready": True, "about": about})
    for line in sys.stdin:
        try:
            reply(answer(json.loads(line)))
        except Exception as error:  # noqa: BLE001 - whatever a peer raises belongs into the table
            reply({"error": f"{type(error).__name__}: {error}"})


def _answer(loaded: Loaded, request: Options) -> Options:
    prompts, max_tokens = request["prompts"], request["max_tokens"]
    started = time.perf_counter()
    answer = loaded.generate(prompts, max_tokens)
    seconds = time.perf_counter() - started
    counts = {len(ids) for ids in answer.token_ids}
    if len(answer.token_ids) != len(prompts) or counts != {max_tokens}:
        raise ValueError(f"{len(answer.token_ids)} answers of {sorted(counts)} tokens to {len(prompts)} prompts of {max_tokens}")
    token_ids = [[int(token) for token in ids] for ids in answer.token_ids]
    return {"seconds": seconds, "first_seconds": answer.first_seconds, "token_ids": token_ids}


def _die_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _take_stdout() -> Any:
    """Keeps the real stdout for replies and points file descriptor 1 at stderr: libraries print there from C, too."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return replies
