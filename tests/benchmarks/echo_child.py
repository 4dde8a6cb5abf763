"""A child for tests: answers a prompt with its first token, over and over; some first tokens make it misbehave."""

from __future__ import annotations

import os
import subprocess
import time

from benchmarks.peers.child import Answer, Loaded, Options, Prompts, serve

REFUSED, SHORT, FATAL, SLOW = 1, 2, 3, 4


def load(options: Options) -> Loaded:
    subprocess.run(["echo", "chatter of a library"], check=True)  # to file descriptor 1, as C code would
    return Loaded(generate, {"version": options["version"], "pid": os.getpid()})


def generate(prompts: Prompts, max_tokens: int) -> Answer:
    first = prompts[0][0]
    if first == REFUSED:
        raise ValueError("this prompt is refused")
    if first == FATAL:
        os._exit(3)
    if first == SLOW:
        time.sleep(60)
    return Answer([[prompt[0]] * (max_tokens - (first == SHORT)) for prompt in prompts])


if __name__ == "__main__":
    serve(load)
