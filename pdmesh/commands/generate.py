"""`pdmesh generate PROMPT`: the continuation of a prompt, streamed to the terminal."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field

from pdmesh.commands.options import Connection, Constraint, Routing, Sampling, flat
from pdmesh.commands.streaming import show_json, show_text


@dataclass(frozen=True)
class Options:
    """Continue a prompt: pdmesh generate "Once upon a time" --max-tokens 50. Without a prompt, standard input is read."""

    prompt: str = field(default="", metadata={"help": "the prompt, also as bare words; -: standard input", "positional": True})
    token_ids: tuple[int, ...] = field(default=(), metadata={"help": "token ids as the prompt instead of text"})
    n: int = field(default=1, metadata={"help": "number of choices"})
    logprobs: int | None = field(
        default=None, metadata={"help": "log-probabilities of so many likely tokens (shown with --json)"}
    )
    json: bool = field(default=False, metadata={"help": "write events as JSON lines"})
    timings: bool = field(default=False, metadata={"help": "show where the time went"})
    sampling: Sampling = field(default_factory=Sampling, metadata=flat())
    constraint: Constraint = field(default_factory=Constraint, metadata=flat())
    routing: Routing = field(default_factory=Routing, metadata=flat())
    connection: Connection = field(default_factory=Connection, metadata=flat())

    def validate(self) -> None:
        """Raise ValueError that names the field."""
        if self.prompt and self.token_ids:
            raise ValueError("token_ids: excludes a text prompt; give one of them")


def run(options: Options) -> int:
    """Stream the answer; return 0 when it is complete."""
    if options.timings:
        from pdmesh.commands.timings import show_timings  # needs rich, and fails before the request is sent
    given = {
        **options.sampling.given(),
        **options.constraint.given(),
        **options.routing.given(),
        "n": options.n,
        "logprobs": options.logprobs,
    }
    with options.connection.client() as client:
        events = client.generate_stream(
            options.token_ids or _prompt(options.prompt),
            model=options.routing.model,
            timeout=options.connection.timeout,
            **given,  # type: ignore[arg-type]  # merged GenerateOptions
        )
        with events:
            answer = show_json(events) if options.json else show_text(events)
    if options.timings:
        show_timings(answer)
    return 0


def _prompt(given: str) -> str:
    """Return the prompt, from standard input if none was given."""
    if given not in ("", "-"):
        return given
    if sys.stdin.isatty():
        print("reading the prompt from standard input; end it with Ctrl-D", file=sys.stderr)
    return sys.stdin.read()
