"""A constraint on the output, from the keyword arguments of a request to the wire."""

from __future__ import annotations

import json
from collections.abc import Mapping

from pdmesh.errors import InvalidArgument
from pdmesh.v1 import common_pb2

CONSTRAINTS = frozenset(field.name for field in common_pb2.Constraint.DESCRIPTOR.fields)


def set_constraint(constraint: common_pb2.Constraint, name: str, value: object) -> None:
    """`name` is one of CONSTRAINTS, of which a request has one. Raises InvalidArgument for two of them; what is of the wrong type
    raises TypeError or ValueError."""
    given = constraint.WhichOneof("kind")
    if given is not None:
        raise InvalidArgument(name, f"{name} excludes {given}; give one of them")
    if name == "json_schema":
        constraint.json_schema = value if isinstance(value, str) else json.dumps(_mapping(value))
    elif name == "choice":
        constraint.choice.values.extend(_strings(value))
    else:
        setattr(constraint, name, value)


def _mapping(value: object) -> Mapping[str, object]:
    if not isinstance(value, Mapping):
        raise TypeError("a JSON schema is a dictionary, or a string with JSON text")
    return value


def _strings(value: object) -> list[str]:
    # A string is a sequence of strings too, and never meant so.
    if isinstance(value, str) or not isinstance(value, (list, tuple)):
        raise TypeError("a list of strings is needed")
    return list(value)
