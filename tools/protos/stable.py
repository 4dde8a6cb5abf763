"""Checks the stability of `pdmesh.v1`: clients that are compiled already continue to work.

`stable.json` holds the names, numbers and types of the client API. What it holds is never removed, renamed, renumbered or given
another type; additions are welcome, and recorded too. A plain field may become `optional`: on the wire nothing changes, and what
older clients leave out stays left out. `python -m tools.protos.stable` records additions and rejects breaking
changes; with `--check` it writes nothing and also rejects additions that are not recorded yet. A breaking change needs a
`pdmesh.v2`.
"""

from __future__ import annotations

import json
import sys

from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto

from tools.protos import descriptors
from tools.protos.descriptors import Api

FILE = descriptors.ROOT / "protos/pdmesh/v1/stable.json"
# Kind ("services", "messages", "enums") → name → key (a method's name, a field's number, a value's number) → description.
Snapshot = dict[str, dict[str, dict[str, str]]]


def snapshot(api: Api, service: str = descriptors.CLIENT_SERVICE) -> Snapshot:
    """Return all that calls of `service` consist of."""
    methods = {method.name: "{} -> {}".format(*descriptors.signature(method)) for method in api.services[service].method}
    taken: Snapshot = {"services": {f"{descriptors.PACKAGE}.{service}": methods}, "messages": {}, "enums": {}}
    for name in sorted(api.reachable([service])):
        definition = api.types[name]
        if isinstance(definition, DescriptorProto):
            fields = sorted(definition.field, key=lambda field: field.number)
            taken["messages"][name] = {str(field.number): _described(definition, field) for field in fields}
        else:
            values = sorted(definition.value, key=lambda value: value.number)
            taken["enums"][name] = {str(value.number): value.name for value in values}
    return taken


def _described(message: DescriptorProto, field: FieldDescriptorProto) -> str:
    kind, name = descriptors.cardinality(message, field), descriptors.type_name(field)
    return f"{field.name}: {kind} {name}" if kind else f"{field.name}: {name}"


def broken(promised: Snapshot, now: Snapshot) -> list[str]:
    """Return what was promised and has changed, a line each."""
    lines = []
    for kind, names in promised.items():
        for name, entries in names.items():
            found = now.get(kind, {}).get(name, {})
            lines += [
                f"{name} {key}: was {what!r}, is {found.get(key)!r}"
                for key, what in entries.items()
                if found.get(key) not in (what, _optional(what))
            ]
            if not entries and name not in now.get(kind, {}):
                lines.append(f"{name}: is gone")
    return lines


def _optional(described: str) -> str:
    """Return a plain field's description once absence can be told from zero."""
    name, separator, kind = described.partition(": ")
    return f"{name}{separator}optional {kind}" if separator and " " not in kind else described


def main() -> None:
    """Record additions, or with `--check` only compare."""
    now = snapshot(descriptors.load())
    promised: Snapshot = json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}
    lines = broken(promised, now)
    if lines:
        raise SystemExit("this breaks clients of pdmesh.v1 that are compiled already:\n  " + "\n  ".join(lines))
    if "--check" not in sys.argv[1:]:
        FILE.write_text(json.dumps(now, indent=2) + "\n", encoding="utf-8")
    elif now != promised:
        raise SystemExit(f"additions to the API are not recorded in {FILE.name}: run `make stubs`")
    else:
        print("the client API is what was promised")


if __name__ == "__main__":
    main()
