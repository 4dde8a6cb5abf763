"""Words without a flag on a command line: `pdmesh generate "Once upon a time" --max-tokens 20`.

Options are frozen dataclasses that `pdmesh.runtime.config` loads. A field with metadata {"positional": True} may also be given as bare
words, in the order of the fields; the last of them takes all words that are left, as one text or, if it is a tuple, one by one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TypeVar, get_origin, get_type_hints

from pdmesh.runtime.config import ENV_PREFIX, load
from pdmesh.runtime.config_options import options_of

T = TypeVar("T")


def parse_options(cls: type[T], argv: Sequence[str], env: Mapping[str, str], *, prog: str) -> T:
    """Options of a command from its arguments and the environment. Wrong ones: one line on stderr, exit with code 2."""
    return load(cls, with_flags(cls, argv), env, prog=prog)


def with_flags(cls: type, argv: Sequence[str]) -> list[str]:
    """`argv` with bare words turned into the flags of the positional fields of `cls`."""
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
    """Flags with their values, and bare words. Everything behind "--" is a word."""
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
