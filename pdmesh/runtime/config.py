"""One loader turns any frozen dataclass into flags, environment variables and `--help`.

    @dataclass(frozen=True)
    class RouterConfig:
        port: int = field(default=50051, metadata={"help": "port to listen on; 0: any free one"})
        redis_url: str = field(default="", metadata={"help": "registry", "secret": True})
        engine: EngineConfig = field(default_factory=EngineConfig, metadata={"flatten": True})
        def validate(self) -> None: ...    # optional; raises ConfigError or ValueError("field: what is wrong; what to do")

    config = load(RouterConfig, None, os.environ, prog="router")

`port` is `--port` and PDMESH_PORT; a flag wins over the environment, that over the default. Fields of a nested dataclass
carry the outer field's name as prefix (`--engine-max-num-seqs`) unless its metadata say `flatten`. Booleans are `--x` and
`--no-x`. Field types: see `pdmesh.runtime.config_values`. Metadata: `help`, `flatten`, `secret` (what is given is never shown).
A secret may also stand in a file, as Kubernetes mounts it: PDMESH_REDIS_URL_FILE names it; PDMESH_REDIS_URL wins over it.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import sys
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn, TypeVar

from pdmesh.runtime import config_values
from pdmesh.runtime.config_options import Option, nested_class, options_of

T = TypeVar("T")
ENV_PREFIX = "PDMESH_"
FILE_SUFFIX = "_FILE"
EXIT_USAGE = 2


class ConfigError(Exception):
    """A setting is wrong: `field` (or the flag or variable that gave it), what the problem is, what to do about it."""

    def __init__(self, field: str, problem: str, remedy: str = "") -> None:
        super().__init__(f"{field}: {problem}" + (f"; {remedy}" if remedy else ""))
        self.field = field
        self.problem = problem
        self.remedy = remedy


def load(cls: type[T], argv: Sequence[str] | None, env: Mapping[str, str], *, prog: str, env_prefix: str = ENV_PREFIX) -> T:
    """`parse` for a program's entry: `argv` None is sys.argv[1:]; a wrong setting prints one line on stderr and exits with
    code 2."""
    try:
        return parse(cls, sys.argv[1:] if argv is None else argv, env, prog=prog, env_prefix=env_prefix)
    except ConfigError as error:
        print(f"{prog}: {error}", file=sys.stderr)
        raise SystemExit(EXIT_USAGE) from None


def parse(cls: type[T], argv: Sequence[str], env: Mapping[str, str], *, prog: str, env_prefix: str = ENV_PREFIX) -> T:
    """A validated `cls` from flags > environment > defaults. Raises ConfigError naming flag, variable or field; SystemExit(0)
    on --help."""
    options = options_of(cls, env_prefix)
    env = {**env, **_secrets_in_files(options, env)}
    flags = _read_flags(cls, options, argv, prog)
    sources = {option.path: _source(option, flags, env) for option in options}
    values = {option.path: _value(option, sources[option.path], flags, env) for option in options}
    config = _build(cls, (), values, sources)
    return typing.cast(T, config)


def describe(cls: type, *, env_prefix: str = ENV_PREFIX) -> str:
    """A Markdown table of all settings of `cls`: flag, variable, kind, default, meaning. For docs."""
    lines = ["| flag | environment | kind | default | meaning |", "| --- | --- | --- | --- | --- |"]
    for option in options_of(cls, env_prefix):
        cells = (f"`{_flag_shown(option)}`", f"`{option.env}`", _kind(option), option.default_text, option.help)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines)


def dump(config: object) -> dict[str, object]:
    """Every setting by its dotted name, to be logged; a secret that is set reads "hidden"."""
    shown: dict[str, object] = {}
    for option in options_of(type(config), ENV_PREFIX):
        value = _leaf(config, option.path)
        shown[option.field] = "hidden" if option.secret and value else value
    return shown


def to_env(config: object, *, env_prefix: str = ENV_PREFIX) -> dict[str, str]:
    """The environment that makes `load` return an equal configuration: how a launcher passes one to a child, secrets included."""
    return {
        option.env: config_values.format_value(option.type_, _leaf(config, option.path))
        for option in options_of(type(config), env_prefix)
    }


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        named, _, problem = message.removeprefix("argument ").partition(": ")
        flag, remedy = named.split("/")[0].split(", ")[0], f"see {self.prog} --help"
        if problem == "expected one argument":  # a value like -1@3 is taken for a flag
            remedy = f"write {flag}=VALUE where the value begins with a -, or {remedy}"
        raise ConfigError(flag, problem or "wrong use", remedy)


def _read_flags(cls: type, options: Sequence[Option], argv: Sequence[str], prog: str) -> dict[str, object]:
    """Text (bool for switches) by dotted field for the flags that were given."""
    parser = _Parser(prog=prog, description=_summary(cls), allow_abbrev=False, argument_default=argparse.SUPPRESS)
    for option in options:
        default = option.default_text if option.required else f"default: {option.default_text}"
        file = f", or a file that holds it: {option.env}{FILE_SUFFIX}" if option.secret else ""
        help_ = f"{option.help} ({default}; {option.env}{file})"
        help_ = help_.strip().replace("%", "%%")
        if option.type_ is bool:
            parser.add_argument(option.flag, dest=option.field, action=argparse.BooleanOptionalAction, help=help_)
        else:
            parser.add_argument(option.flag, dest=option.field, metavar=_kind(option), help=help_)
    known, unknown = parser.parse_known_args(list(argv))
    if unknown:
        raise _unknown_flag(unknown[0], options, prog)
    return vars(known)


def _secrets_in_files(options: Sequence[Option], env: Mapping[str, str]) -> dict[str, str]:
    """By variable, without the end of the last line, which editors add."""
    found = {}
    for option in options:
        name = option.env + FILE_SUFFIX
        if option.secret and option.env not in env and env.get(name):
            try:
                found[option.env] = Path(env[name]).read_text(encoding="utf-8").rstrip("\r\n")
            except (OSError, UnicodeDecodeError) as error:
                problem = error.strerror if isinstance(error, OSError) else "is not UTF-8"
                raise ConfigError(name, f"{env[name]}: {problem}", f"name a file that can be read, or set {option.env}") from None
    return found


def _unknown_flag(argument: str, options: Sequence[Option], prog: str) -> ConfigError:
    name = argument.split("=")[0]
    near = difflib.get_close_matches(name, [option.flag for option in options], n=1)
    remedy = f"did you mean {near[0]}?" if near else f"see {prog} --help"
    return ConfigError(name, "unknown flag" if name.startswith("-") else "unexpected argument", remedy)


def _source(option: Option, flags: Mapping[str, object], env: Mapping[str, str]) -> str:
    """What to name when the option's value is wrong: the variable if that gave it, else the flag."""
    return option.env if option.field not in flags and option.env in env else option.flag


def _value(option: Option, source: str, flags: Mapping[str, object], env: Mapping[str, str]) -> object:
    given = flags.get(option.field, env.get(option.env))
    if given is None:
        if option.required:
            raise ConfigError(option.flag, "is required", f"give {option.flag} or set {option.env}")
        return option.default
    if not isinstance(given, str):
        return given
    try:
        return config_values.parse_value(option.type_, given)
    except ValueError as error:
        raise ConfigError(source, "the value cannot be read" if option.secret else str(error)) from None


_Path = tuple[str, ...]


def _build(cls: type, path: _Path, values: Mapping[_Path, object], sources: Mapping[_Path, str]) -> object:
    """The (nested) dataclass, inner ones first, each validated once."""
    hints = typing.get_type_hints(cls)
    arguments: dict[str, object] = {}
    for field in dataclasses.fields(cls):
        if field.init:
            nested = nested_class(hints[field.name])
            inner = (*path, field.name)
            arguments[field.name] = values[inner] if nested is None else _build(nested, inner, values, sources)
    try:
        config: object = cls(**arguments)
        validate = getattr(config, "validate", None)
        if validate is not None:
            validate()
    except (ConfigError, ValueError) as error:
        raise _located(error, path, sources) from error
    return config


def _located(error: ConfigError | ValueError, path: _Path, sources: Mapping[_Path, str]) -> ConfigError:
    """`error` of a dataclass at `path`, naming the flag or variable instead of the bare field."""
    if isinstance(error, ConfigError):
        field, problem, remedy = error.field, error.problem, error.remedy
    else:  # from a package below runtime: "field: what is wrong; what to do"
        field, _, problem = str(error).partition(": ")
        remedy = ""
    source = sources.get((*path, *field.split(".")))
    if source is not None:
        return ConfigError(source, problem, remedy)
    return error if isinstance(error, ConfigError) else ConfigError(".".join(path) or "configuration", str(error))


def _leaf(config: object, path: _Path) -> object:
    for name in path:
        config = getattr(config, name)
    return config


def _summary(cls: type) -> str:
    return (cls.__doc__ or "").strip().split("\n")[0]


def _kind(option: Option) -> str:
    return config_values.type_name(option.type_)


def _flag_shown(option: Option) -> str:
    return f"{option.flag}, --no-{option.flag[2:]}" if option.type_ is bool else option.flag
