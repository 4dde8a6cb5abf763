"""The `pdmesh` program: it finds the command, loads its options, and turns errors into one line and an exit code.

Exit codes: 0 done; 1 failed; 2 wrong use, or a request that the mesh calls invalid; 3 no mesh, or no capacity in it; 4 the
deadline passed; 130 interrupted.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import Any, Protocol, TypeVar, cast, get_origin, get_type_hints

from pdmesh.errors import DeadlineExceeded, InvalidArgument, MeshError, NotFound, Overloaded, Unavailable
from pdmesh.platform import capabilities
from pdmesh.runtime.config import ENV_PREFIX, load, options_of

# Positional words on a command line: `pdmesh generate "Once upon a time" --max-tokens 20`.
#
# Options are frozen dataclasses that `pdmesh.runtime.config` loads. A field with metadata {"positional": True} may also be given
# as bare words, in the order of the fields; the last of them takes all remaining words, as one text or, if it is a tuple, one by
# one.


T = TypeVar("T")


def parse_options(cls: type[T], argv: Sequence[str], env: Mapping[str, str], *, prog: str) -> T:
    """Return the options of a command from its arguments and the environment. On an error, print one line on stderr and exit with
    code 2."""
    return load(cls, with_flags(cls, argv), env, prog=prog)


def with_flags(cls: type, argv: Sequence[str]) -> list[str]:
    """Return `argv` with bare words turned into the flags of the positional fields of `cls`."""
    assert dataclasses.is_dataclass(cls)
    names = [field.name for field in dataclasses.fields(cls) if field.metadata.get("positional")]
    flags, words = _split(argv, _flags_with_value(cls))
    if not names:
        return [*flags, *words]
    joint = "," if get_origin(get_type_hints(cls)[names[-1]]) is tuple else " "
    given = [*words[: len(names) - 1], *([joint.join(words[len(names) - 1 :])] if len(words) >= len(names) else [])]
    return [*flags, *(f"--{name.replace('_', '-')}={word}" for name, word in zip(names, given, strict=False))]


def _flags_with_value(cls: type) -> frozenset[str]:
    return frozenset(option.flag for option in options_of(cls, ENV_PREFIX) if option.type_ is not bool)


def _split(argv: Sequence[str], flags_with_value: frozenset[str]) -> tuple[list[str], list[str]]:
    """Return flags with their values, and bare words. Every argument after "--" is a word."""
    flags: list[str] = []
    words: list[str] = []
    rest = iter(argv)
    for argument in rest:
        if argument == "--":
            words.extend(rest)
        elif not argument.startswith("-") or argument == "-":
            words.append(argument)
        elif argument in flags_with_value and (value := next(rest, None)) is not None:
            flags.append(f"{argument}={value}")
        else:
            flags.append(argument)
    return flags, words


EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_UNAVAILABLE = 3
EXIT_DEADLINE = 4
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141


@dataclasses.dataclass(frozen=True)
class Command:
    """Describe a command for `pdmesh --help` without importing it. `extra` installs all packages that it needs; empty: the extra
    of the missing package does. `subcommands`: words after it that select another command, with options of its own; "run" is the
    command itself."""

    summary: str
    extra: str = ""
    subcommands: tuple[str, ...] = ()


# A new command is a file in `pdmesh/commands/`, with `Options` and `run`, and a line here.
COMMANDS: dict[str, Command] = {
    "up": Command("start a mesh on this machine: Redis, router, prefill and decode workers", extra="local"),
    "generate": Command("continue a prompt"),
    "chat": Command("talk to the model, or ask one question"),
    "loadtest": Command(
        "load a mesh, or any OpenAI server; loadtest compare, loadtest report: what was measured",
        subcommands=("run", "compare", "report"),
    ),
    "status": Command("show workers, their roles and load, and the objectives in force"),
    "explain": Command("why a request went where it went, or where one would go now"),
    "roles": Command("change the roles of a worker while it runs"),
    "models": Command("list models, or fetch or convert one"),
    "serving": Command("pause a mesh, let it sleep with its memory given back, or have it run again"),
    "weights": Command("have a mesh compute with other weights of its model, while it serves"),
    "rollout": Command("share new requests between revisions of a model's workers, or shift them step by step"),
    "adapters": Command("list LoRA adapters, or load or unload one on every worker of a model"),
    "profile": Command("show where the time of an engine's step goes on this machine", extra="local"),
    "keys": Command("make, list and revoke the API keys that routers ask for", extra="services"),
    "tls": Command("make certificates, so that a mesh encrypts and rejects other clients", extra="services"),
    "secret": Command("make the secret that tells the processes of a mesh from others on the network", extra="services"),
    "doctor": Command("check what this machine has and lacks"),
    "plan": Command(
        "say what a deployment takes: how many workers of which kind keep the objectives under a load", extra="services"
    ),
    "distill-draft": Command("train a small draft of a model on its own outputs", extra="local"),
    "demo": Command("start a mesh, ask a question, show where the time went, stop", extra="local"),
}
# The extra that installs a missing package.
_EXTRAS = {
    "rich": "cli",
    "redis": "services",
    "tokenizers": "services",
    "grpc_health": "services",
    "uvicorn": "services",
    "numpy": "services",
    "torch": "worker",
    "transformers": "local",
    "h11": "loadtest",
}


class CommandModule(Protocol):
    """Describe a file in `pdmesh/commands/`."""

    Options: type[Any]

    def run(self, options: object) -> int:
        """Run the command; return the exit code."""
        ...


def main(argv: Sequence[str] | None = None) -> None:
    """Run the program and exit."""
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["plan"]:
        # This command simulates, with compiled modules if they exist; `use` must precede the import of its modules.
        importlib.import_module("pdmesh.simulator.compiled").use()
    sys.exit(run(argv))


def run(argv: Sequence[str]) -> int:
    """Run the program; return the exit code."""
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(overview())
        return 0 if argv else EXIT_USAGE
    if argv[0] in ("-V", "--version"):
        print(f"pdmesh {_version()}")
        return 0
    if argv[0] not in COMMANDS:
        return _unknown(argv[0])
    try:
        capabilities.taken_away()
    except ValueError as error:
        print(f"pdmesh: {error}", file=sys.stderr)
        return EXIT_USAGE
    return _run_command(argv[0], argv[1:])


def overview() -> str:
    """Return the text of `pdmesh --help`."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name.ljust(width)}  {command.summary}" for name, command in COMMANDS.items()]
    return "\n".join(
        [
            "usage: pdmesh COMMAND [options]",
            "",
            "Serve large language models with prefill and decode separated, and use them.",
            "",
            *lines,
            "",
            "pdmesh COMMAND --help shows the options; each can also be set in the environment as PDMESH_<NAME>.",
            "First steps: `pdmesh doctor`, then `pdmesh up`, then `pdmesh chat` in another terminal.",
        ]
    )


def _version() -> str:
    try:
        return metadata.version("pdmesh")
    except metadata.PackageNotFoundError:
        return "(not installed: run from its source)"


def _unknown(name: str) -> int:
    near = difflib.get_close_matches(name, COMMANDS, n=1)
    remedy = f"did you mean {near[0]}?" if near else f"there are: {', '.join(COMMANDS)}"
    print(f"pdmesh: {name!r} is not a command; {remedy}", file=sys.stderr)
    return EXIT_USAGE


def all_commands() -> list[tuple[str, ...]]:
    """Return the words of each command and subcommand."""
    longer = [(name, word) for name, command in COMMANDS.items() for word in command.subcommands if word != "run"]
    return [*((name,) for name in COMMANDS), *longer]


def command_of(words: Sequence[str]) -> CommandModule:
    """Return the module of a command. Raises ModuleNotFoundError where a package that the command needs is missing."""
    return cast(CommandModule, importlib.import_module("pdmesh.commands." + "_".join(words).replace("-", "_")))


def _run_command(name: str, argv: Sequence[str]) -> int:
    try:
        words, argv = _subcommand(name, argv)
        command = command_of(words)
        options = parse_options(command.Options, argv, os.environ, prog=" ".join(("pdmesh", *words)))
        return command.run(options)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader of our output is gone; the interpreter must not fail again when it flushes.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE
    except MeshError as error:
        print(f"pdmesh {name}: {explain(error)}", file=sys.stderr)
        return exit_code(error)
    except ModuleNotFoundError as error:
        print(f"pdmesh {name}: {_missing_package(name, error)}", file=sys.stderr)
        return EXIT_FAILED


def _subcommand(name: str, argv: Sequence[str]) -> tuple[tuple[str, ...], Sequence[str]]:
    """Return the words that name the command, and the rest of `argv`."""
    if not argv or argv[0] not in COMMANDS[name].subcommands:
        return (name,), argv
    return (name,) if argv[0] == "run" else (name, argv[0]), argv[1:]


def explain(error: MeshError) -> str:
    """Return the text about an error of the mesh for a person at a terminal."""
    if isinstance(error, Overloaded) and error.retry_delay_s is not None:
        return f"{error.message} (try again in {error.retry_delay_s:.1f} s, or give --retry-overload)"
    if isinstance(error, Unavailable):
        return (
            f"{error.message} (is a mesh running? `pdmesh up` starts one; --router names another, --tls-ca its CA if it encrypts)"
        )
    return error.message


def exit_code(error: MeshError) -> int:
    """Return the exit code for an error of the mesh."""
    if isinstance(error, (InvalidArgument, NotFound)):
        return EXIT_USAGE
    if isinstance(error, (Unavailable, Overloaded)):
        return EXIT_UNAVAILABLE
    return EXIT_DEADLINE if isinstance(error, DeadlineExceeded) else EXIT_FAILED


def _missing_package(command: str, error: ModuleNotFoundError) -> str:
    package = (error.name or "").partition(".")[0]
    extra = COMMANDS[command].extra or _EXTRAS.get(package, "local")
    return f"the Python package {package!r} is missing; install what this command needs with: pip install 'pdmesh[{extra}]'"
