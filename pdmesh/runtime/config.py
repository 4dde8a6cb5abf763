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
`--no-x`. Field types: see `pdmesh.runtime.config`. Metadata: `help`, `flatten`, `secret` (what is given is never shown),
`choices` (the values of a str, such as the names of a registry: read when flags are, so that the registry is the only list),
`flag` (the name outside, with underscores, where the field cannot have it: `engine` is --engine and PDMESH_ENGINE).
A secret may also stand in a file, as Kubernetes mounts it: PDMESH_REDIS_URL_FILE names it; PDMESH_REDIS_URL wins over it.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import enum
import math
import operator
import re
import sys
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NoReturn, TypeVar, get_args, get_origin

# Conversion between text (a flag or an environment variable) and the value of a configuration field, by the field's type.
#
# Types: str, int, float, bool, Literal of str, Enum, `X | None` (an empty text is None) and tuple[X, ...] (comma-separated; an
# empty text is the empty tuple). Numbers are plain and finite. `format_value` is the inverse of `parse_value`. A field of texts
# with the metadata `repeated` has a flag that may be given several times, one text each; its variable holds one a line.


Value = object
_INTEGER = re.compile(r"[+-]?[0-9]{1,30}")
_TRUE = ("1", "true", "yes", "on")
_FALSE = ("0", "false", "no", "off")


def is_supported(type_: object) -> bool:
    """Return whether this module can parse `type_`."""
    if (inner := optional_of(type_)) is not None:
        return optional_of(inner) is None and is_supported(inner)
    if (item := item_of(type_)) is not None:
        return item_of(item) is None and item is not bool and is_supported(item)
    return type_ in (str, int, float, bool) or choices_of(type_) is not None


def optional_of(type_: object) -> object | None:
    """Return X of `X | None`, else None."""
    if get_origin(type_) not in (typing.Union, types.UnionType):
        return None
    inner = [arg for arg in get_args(type_) if arg is not types.NoneType]
    return inner[0] if len(inner) == 1 and len(get_args(type_)) == 2 else None


def item_of(type_: object) -> object | None:
    """Return X of tuple[X, ...], else None."""
    args = get_args(type_)
    return args[0] if get_origin(type_) is tuple and len(args) == 2 and args[1] is Ellipsis else None


def choices_of(type_: object) -> dict[str, Value] | None:
    """Return the value by text for a Literal of strings or an Enum (the text is its value if that is a string, else its
    lower-case name)."""
    if get_origin(type_) is Literal:
        literals = get_args(type_)
        return {value: value for value in literals} if all(isinstance(value, str) for value in literals) else None
    if isinstance(type_, type) and issubclass(type_, enum.Enum):
        return {member.value if isinstance(member.value, str) else member.name.lower(): member for member in type_}
    return None


def type_name(type_: object) -> str:
    """Return the kind of value as a person reads it: "integer", "a|b", "text, text, ..."."""
    if (inner := optional_of(type_)) is not None:
        return f"{type_name(inner)} or empty"
    if (item := item_of(type_)) is not None:
        return f"{type_name(item)},..."
    if (choices := choices_of(type_)) is not None:
        return "|".join(choices)
    return {str: "text", int: "integer", float: "number", bool: "true|false"}[typing.cast("type", type_)]


def parse_value(type_: object, text: str) -> Value:
    """Return `text` as a value of `type_`. Raises ValueError that says what is wrong with the text and what would be right."""
    if (inner := optional_of(type_)) is not None:
        return parse_value(inner, text) if text else None
    if (item := item_of(type_)) is not None:
        return tuple(parse_value(item, part.strip()) for part in text.split(",")) if text.strip() else ()
    if (choices := choices_of(type_)) is not None:
        return _parse_choice(choices, text)
    if type_ is str:
        return text
    return {int: _parse_int, float: _parse_float, bool: _parse_bool}[typing.cast("type", type_)](text)


def format_value(type_: object, value: Value) -> str:
    """Return the text that `parse_value` reads as `value`. Raises ValueError if there is none (a comma inside a tuple's item)."""
    if value is None:
        return ""
    inner = optional_of(type_) or type_
    if (item := item_of(inner)) is not None and isinstance(value, tuple):
        text = ",".join(format_value(item, part) for part in value)
    elif (choices := choices_of(inner)) is not None:
        text = next(name for name, member in choices.items() if member == value)
    elif isinstance(value, bool):
        text = "true" if value else "false"
    else:
        text = str(value)
    if parse_value(type_, text) != value:
        raise ValueError(f"{value!r} cannot be written as {type_name(type_)}")
    return text


def _parse_choice(choices: dict[str, Value], text: str) -> Value:
    if text not in choices:
        raise ValueError(f"{_shown(text)} is not known; give one of {', '.join(choices)}")
    return choices[text]


def _parse_int(text: str) -> int:
    if not _INTEGER.fullmatch(text):
        raise ValueError(f"{_shown(text)} is not an integer; give a number such as 8")
    return int(text)


def _parse_float(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ValueError(f"{_shown(text)} is not a finite number; give one such as 0.5")
    return value


def _parse_bool(text: str) -> bool:
    lowered = text.lower()
    if lowered not in (*_TRUE, *_FALSE):
        raise ValueError(f"{_shown(text)} is neither true nor false; give true or false")
    return lowered in _TRUE


def _shown(text: str) -> str:
    return repr(text) if len(text) <= 80 else repr(text[:77] + "...")


# The flags and environment variables of a configuration dataclass: one `Option` for each leaf field.


@dataclass(frozen=True)
class Option:
    """Describe one leaf of a (nested) configuration: its place, its outside names, its values."""

    path: tuple[str, ...]
    flag: str
    env: str
    type_: object
    default: object
    required: bool
    help: str
    secret: bool
    repeated: bool = False

    @property
    def field(self) -> str:
        """Return the dotted name within the configuration."""
        return ".".join(self.path)

    @property
    def default_text(self) -> str:
        """Return the default as a person reads it. It is in the source, so it is not a secret, also for an option that may hold
        one."""
        if self.required:
            return "required"
        return _text_of(self, self.default) or "empty"


def options_of(cls: type, env_prefix: str) -> tuple[Option, ...]:
    """Return all leaves of `cls` in order. Raises TypeError for a field of unsupported type and for two fields with one flag:
    bugs of the author."""
    options = tuple(_walk(cls, (), "", env_prefix))
    flags: dict[str, str] = {}
    for option in options:
        if option.flag in flags:
            raise TypeError(f"{cls.__name__}: {option.field} and {flags[option.flag]} both want {option.flag}")
        flags[option.flag] = option.field
    return options


def nested_class(type_: object) -> type | None:
    """Return `type_` if it is a dataclass to descend into, else None."""
    return type_ if isinstance(type_, type) and dataclasses.is_dataclass(type_) else None


def _walk(cls: type, path: tuple[str, ...], prefix: str, env_prefix: str, base: object = dataclasses.MISSING) -> Iterator[Option]:
    """Yield the options. `prefix` precedes field names in flags; `base` is the outer default, an instance of `cls`, if there is
    one."""
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        if not field.init:
            continue
        default = _default_of(field) if base is dataclasses.MISSING else getattr(base, field.name)
        name = str(field.metadata.get("flag", field.name))
        nested = nested_class(hints[field.name])
        if nested is not None:
            inner = prefix if field.metadata.get("flatten") else f"{prefix}{name}_"
            yield from _walk(nested, (*path, field.name), inner, env_prefix, default)
            continue
        if not is_supported(hints[field.name]):
            raise TypeError(f"{cls.__name__}.{field.name}: configuration cannot hold {hints[field.name]}")
        yield _option(field, path, prefix + name, env_prefix, _chosen_type(field, hints[field.name]), default)


def _chosen_type(field: dataclasses.Field[object], type_: object) -> object:
    """The field's type, or a Literal of its `choices`. Raises TypeError where those are given for another type than str."""
    choices = field.metadata.get("choices")
    if choices is None:
        return type_
    if type_ is not str:
        raise TypeError(f"{field.name}: choices are for text, not for {type_}")
    return operator.getitem(Literal, tuple(choices))


def _option(
    field: dataclasses.Field[object], path: tuple[str, ...], name: str, env_prefix: str, type_: object, default: object
) -> Option:
    metadata: Mapping[str, object] = field.metadata
    return Option(
        path=(*path, field.name),
        flag="--" + name.replace("_", "-"),
        env=env_prefix + name.upper(),
        type_=type_,
        default=None if default is dataclasses.MISSING else default,
        required=default is dataclasses.MISSING,
        help=str(metadata.get("help", "")),
        secret=bool(metadata.get("secret", False)),
        repeated=bool(metadata.get("repeated", False)),
    )


def _default_of(field: dataclasses.Field[object]) -> object:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


T = TypeVar("T")
ENV_PREFIX = "PDMESH_"
FILE_SUFFIX = "_FILE"
EXIT_USAGE = 2


class ConfigError(Exception):
    """Raised for a wrong setting: `field` (or the flag or variable that gave it), the problem, and what to do about it."""

    def __init__(self, field: str, problem: str, remedy: str = "") -> None:
        super().__init__(f"{field}: {problem}" + (f"; {remedy}" if remedy else ""))
        self.field = field
        self.problem = problem
        self.remedy = remedy


def load(cls: type[T], argv: Sequence[str] | None, env: Mapping[str, str], *, prog: str, env_prefix: str = ENV_PREFIX) -> T:
    """Return `parse`'s result, as a program's entry: `argv` None is sys.argv[1:]; a wrong setting prints one line on stderr and
    exits with code 2."""
    try:
        return parse(cls, sys.argv[1:] if argv is None else argv, env, prog=prog, env_prefix=env_prefix)
    except ConfigError as error:
        print(f"{prog}: {error}", file=sys.stderr)
        raise SystemExit(EXIT_USAGE) from None


def parse(cls: type[T], argv: Sequence[str], env: Mapping[str, str], *, prog: str, env_prefix: str = ENV_PREFIX) -> T:
    """Return a validated `cls` from flags > environment > defaults. Raises ConfigError naming flag, variable or field;
    SystemExit(0) on --help."""
    options = options_of(cls, env_prefix)
    env = {**env, **_secrets_in_files(options, env)}
    flags = _read_flags(cls, options, argv, prog)
    sources = {option.path: _source(option, flags, env) for option in options}
    values = {option.path: _value(option, sources[option.path], flags, env) for option in options}
    config = _build(cls, (), values, sources)
    return typing.cast(T, config)


def describe(cls: type, *, env_prefix: str = ENV_PREFIX) -> str:
    """Return a Markdown table of all settings of `cls`: flag, variable, kind, default, meaning. For docs."""
    lines = ["| flag | environment | kind | default | meaning |", "| --- | --- | --- | --- | --- |"]
    for option in options_of(cls, env_prefix):
        cells = (f"`{_flag_shown(option)}`", f"`{option.env}`", _kind(option), option.default_text, option.help)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines)


def dump(config: object) -> dict[str, object]:
    """Return every setting by its dotted name, for logs; a secret that is set reads "hidden"."""
    shown: dict[str, object] = {}
    for option in options_of(type(config), ENV_PREFIX):
        value = _leaf(config, option.path)
        shown[option.field] = "hidden" if option.secret and value else value
    return shown


def to_env(config: object, *, env_prefix: str = ENV_PREFIX) -> dict[str, str]:
    """Return the environment that makes `load` return an equal configuration, secrets included: a launcher passes it to a
    child."""
    return {option.env: _text_of(option, _leaf(config, option.path)) for option in options_of(type(config), env_prefix)}


def _text_of(option: Option, value: object) -> str:
    if option.repeated and isinstance(value, tuple):
        return "\n".join(map(str, value))
    return format_value(option.type_, value)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        named, _, problem = message.removeprefix("argument ").partition(": ")
        flag, remedy = named.split("/")[0].split(", ")[0], f"see {self.prog} --help"
        if problem == "expected one argument":  # argparse takes a value like -1@3 for a flag
            remedy = f"write {flag}=VALUE where the value begins with a -, or {remedy}"
        raise ConfigError(flag, problem or "wrong use", remedy)


def _read_flags(cls: type, options: Sequence[Option], argv: Sequence[str], prog: str) -> dict[str, object]:
    """Return the text (bool for switches) by dotted field for the given flags."""
    parser = _Parser(prog=prog, description=_summary(cls), allow_abbrev=False, argument_default=argparse.SUPPRESS)
    for option in options:
        default = option.default_text if option.required else f"default: {option.default_text}"
        file = f", or a file that holds it: {option.env}{FILE_SUFFIX}" if option.secret else ""
        help_ = f"{option.help} ({default}; {option.env}{file})"
        help_ = help_.strip().replace("%", "%%")
        if option.repeated:
            parser.add_argument(option.flag, dest=option.field, metavar="text", action="append", help=f"{help_}; may be repeated")
        elif option.type_ is bool:
            parser.add_argument(option.flag, dest=option.field, action=argparse.BooleanOptionalAction, help=help_)
        else:
            parser.add_argument(option.flag, dest=option.field, metavar=_kind(option), help=help_)
    known, unknown = parser.parse_known_args(list(argv))
    if unknown:
        raise _unknown_flag(unknown[0], options, prog)
    return vars(known)


def _secrets_in_files(options: Sequence[Option], env: Mapping[str, str]) -> dict[str, str]:
    """Return the secrets by variable, without the final newline that editors add."""
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
    """Return what to name when the option's value is wrong: the variable if that gave it, else the flag."""
    return option.env if option.field not in flags and option.env in env else option.flag


def _value(option: Option, source: str, flags: Mapping[str, object], env: Mapping[str, str]) -> object:
    given = flags.get(option.field, env.get(option.env))
    if given is None:
        if option.required:
            raise ConfigError(option.flag, "is required", f"give {option.flag} or set {option.env}")
        return option.default
    if isinstance(given, list):
        return tuple(given)
    if not isinstance(given, str):
        return given
    if option.repeated:
        return tuple(given.splitlines())
    try:
        return parse_value(option.type_, given)
    except ValueError as error:
        raise ConfigError(source, "the value cannot be read" if option.secret else str(error)) from None


_Path = tuple[str, ...]


def _build(cls: type, path: _Path, values: Mapping[_Path, object], sources: Mapping[_Path, str]) -> object:
    """Return the (nested) dataclass, built inner ones first, each validated once."""
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
    """Return `error` of a dataclass at `path`, naming the flag or variable instead of the bare field."""
    if isinstance(error, ConfigError):
        field, problem, remedy = error.field, error.problem, error.remedy
    else:  # raised by a package below runtime: "field: what is wrong; what to do"
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
    return type_name(option.type_)


def _flag_shown(option: Option) -> str:
    return f"{option.flag}, --no-{option.flag[2:]}" if option.type_ is bool else option.flag
