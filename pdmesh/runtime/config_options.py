"""What a configuration dataclass offers as flags and environment variables: one `Option` for each leaf field."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from pdmesh.runtime import config_values


@dataclass(frozen=True)
class Option:
    """One leaf of a (nested) configuration: where it stands, how it is named outside, what it may hold."""

    path: tuple[str, ...]
    flag: str
    env: str
    type_: object
    default: object
    required: bool
    help: str
    secret: bool

    @property
    def field(self) -> str:
        """Dotted name within the configuration."""
        return ".".join(self.path)

    @property
    def default_text(self) -> str:
        """The default as a person reads it. It stands in the source: no secret, also of an option that may hold one."""
        if self.required:
            return "required"
        return config_values.format_value(self.type_, self.default) or "empty"


def options_of(cls: type, env_prefix: str) -> tuple[Option, ...]:
    """All leaves of `cls` in order. Raises TypeError for a field of unsupported type and for two fields with one flag: bugs
    of the author."""
    options = tuple(_walk(cls, (), "", env_prefix))
    flags: dict[str, str] = {}
    for option in options:
        if option.flag in flags:
            raise TypeError(f"{cls.__name__}: {option.field} and {flags[option.flag]} both want {option.flag}")
        flags[option.flag] = option.field
    return options


def nested_class(type_: object) -> type | None:
    """`type_` if it is a dataclass to descend into, else None."""
    return type_ if isinstance(type_, type) and dataclasses.is_dataclass(type_) else None


def _walk(cls: type, path: tuple[str, ...], prefix: str, env_prefix: str, base: object = dataclasses.MISSING) -> Iterator[Option]:
    """`prefix` goes before field names in flags; `base` is the outer default, an instance of `cls`, if there is one."""
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        if not field.init:
            continue
        default = _default_of(field) if base is dataclasses.MISSING else getattr(base, field.name)
        nested = nested_class(hints[field.name])
        if nested is not None:
            inner = prefix if field.metadata.get("flatten") else f"{prefix}{field.name}_"
            yield from _walk(nested, (*path, field.name), inner, env_prefix, default)
            continue
        if not config_values.is_supported(hints[field.name]):
            raise TypeError(f"{cls.__name__}.{field.name}: configuration cannot hold {hints[field.name]}")
        yield _option(field, path, prefix + field.name, env_prefix, hints[field.name], default)


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
    )


def _default_of(field: dataclasses.Field[object]) -> object:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default
