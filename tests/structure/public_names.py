"""All names that users of pdmesh can write down: flags, environment variables, metrics, wire names, make targets, the client.

`python -m tests.structure.public_names --write` records them in public_names.json; `gone` says which of those recorded are no
longer there. Only modules without torch are imported; what stands in no table is read from the syntax tree of the sources.
"""

from __future__ import annotations

import dataclasses
import enum
import inspect
import json
import re
import sys
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import is_typeddict

from google.protobuf.descriptor import FileDescriptor
from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto

from kvtransfer.transports.registry import TRANSPORTS
from pdmesh import cli, client, errors
from pdmesh.autoscaler.config import AutoscalerConfig
from pdmesh.autoscaler.metrics import ALL as AUTOSCALER_INSTRUMENTS
from pdmesh.client import types as client_types
from pdmesh.client.stream import AsyncStream, Stream
from pdmesh.console.main import ConsoleConfig
from pdmesh.engine.kernels.cpu.isa import TIERS
from pdmesh.loadtest.arrivals import KINDS
from pdmesh.models.catalogue import KNOWN_MODELS
from pdmesh.monitoring.dashboards import all_dashboards
from pdmesh.monitoring.rules import groups
from pdmesh.planning.devices import DEVICES
from pdmesh.planning.objectives import PRIORITIES
from pdmesh.runtime.config import ENV_PREFIX, FILE_SUFFIX, Option, choices_of, item_of, optional_of, options_of, type_name
from pdmesh.runtime.telemetry.metrics import Instrument
from pdmesh.runtime.telemetry.metrics_exporters import INFO
from pdmesh.simulator.arrivals import READERS
from pdmesh.simulator.config import SimulatorConfig
from pdmesh.third_party.kserve import grpc_service_pb2
from pdmesh.third_party.vllm import vllm_engine_pb2
from pdmesh.v1 import common_pb2, decode_pb2, mesh_pb2, prefill_pb2, transfer_pb2, worker_pb2
from pdmesh.worker.config import DecodeConfig, PrefillConfig, WorkerConfig
from pdmesh.worker.metrics import ALL as WORKER_INSTRUMENTS
from pdmesh.worker.roles import ROLE_NAMES
from router.config import RouterConfig
from router.endpoint_picker.config import PickerConfig
from router.endpoint_picker.service import ALL as PICKER_INSTRUMENTS
from router.telemetry.metrics import ALL as ROUTER_INSTRUMENTS
from tests.structure import source_names
from tests.structure.source_names import ROOT

FILE = Path(__file__).with_suffix(".json")
# Section → name → facts. A name may get further facts; those that were there stay.
Names = dict[str, dict[str, list[str]]]

PROGRAMS: dict[str, type] = {
    "router": RouterConfig, "worker": WorkerConfig, "prefill_service": PrefillConfig, "decode_service": DecodeConfig,
    "autoscaler": AutoscalerConfig, "simulator": SimulatorConfig, "pdmesh.console": ConsoleConfig,
    "router.endpoint_picker": PickerConfig,
}  # fmt: skip
# By the words behind `pdmesh`.
COMMANDS: dict[str, type] = {" ".join(words): cli.command_of(words).Options for words in cli.all_commands()}
API_FILES = (common_pb2, decode_pb2, mesh_pb2, prefill_pb2, transfer_pb2, worker_pb2)
FOREIGN_FILES = (grpc_service_pb2, vllm_engine_pb2)
# Programs that went where tests and tools are, and the names that they were recorded by.
MOVED = {
    "tests.chaos": "benchmarks.chaos", "tests.soak": "benchmarks.soak", "tests.equality": "benchmarks.equality",
    "tests.interop": "benchmarks.clients", "tests.interop.load.vllm_bench_serve": "benchmarks.clients.load.vllm_bench_serve",
    "draft_heads": "benchmarks.spec.train_heads",
}  # fmt: skip
_PROTOCOLS = {f"__{name}__" for name in ("iter", "next", "enter", "exit", "aiter", "anext", "aenter", "aexit")}


def collect() -> Names:
    """The names of the tree that is imported."""
    names: Names = {f"flags of {name}": _flags(cls) for name, cls in PROGRAMS.items()}
    names |= {f"flags of pdmesh {name}": _flags(cls) for name, cls in COMMANDS.items()}
    names["metrics"] = {each.name: _metric(each) for each in _instruments()}
    names["values"] = _values()
    names["recording rules and alerts"] = _bare(rule.record or rule.alert for group in groups() for rule in group.rules)
    names["dashboards"] = _bare(board.name for board in all_dashboards())
    names["RPCs"], names["messages"] = _api()
    names["client"] = dict(_client())
    names |= {section: _bare(found) for section, found in source_names.collect().items()}
    variables = {option.env for cls in (*PROGRAMS.values(), *COMMANDS.values()) for option in options_of(cls, ENV_PREFIX)}
    for path in (ROOT / "Dockerfile", *(ROOT / "k8s").rglob("*.yaml")):
        variables.update(source_names.VARIABLE.findall(path.read_text(encoding="utf-8")))
    names[source_names.ENVIRONMENT] |= _bare(variables)
    names |= _build_names()
    return {section: dict(sorted(found.items())) for section, found in sorted(names.items())}


def gone(before: Names, now: Names) -> list[str]:
    """What of `before` is not there `now`, a line each."""
    lines = []
    for section, names in before.items():
        found = now.get(section, {})
        for name, facts in names.items():
            if name not in found:
                lines.append(f"{section}: {name} is gone")
                continue
            lines += [f"{section}: {name}: was {fact!r}, is {found[name]}" for fact in facts if fact not in found[name]]
    return lines


def recorded() -> Names:
    """What public_names.json holds."""
    names: Names = json.loads(FILE.read_text(encoding="utf-8"))
    return names


def _bare(names: Iterable[str]) -> dict[str, list[str]]:
    return {name: [] for name in names}


def _flags(cls: type) -> dict[str, list[str]]:
    assert dataclasses.is_dataclass(cls)
    words = [field.name for field in dataclasses.fields(cls) if field.metadata.get("positional")]
    return {option.flag: _flag(option, words) for option in options_of(cls, ENV_PREFIX)}


def _flag(option: Option, words: list[str]) -> list[str]:
    """Variable, kind, default, choices, place among the bare words, whether it may be given in a file."""
    choices = choices_of(optional_of(option.type_) or item_of(option.type_) or option.type_)
    kind = type_name(option.type_)
    facts = [option.env, kind.replace("|".join(choices), "choice") if choices else kind, f"default {option.default_text}"]
    facts += [f"choice {choice}" for choice in choices or ()]
    facts += [f"word {words.index(option.field)}"] if option.field in words else []
    return facts + ([option.env + FILE_SUFFIX] if option.secret else [])


def _instruments() -> Iterable[Instrument]:
    return (INFO, *ROUTER_INSTRUMENTS, *PICKER_INSTRUMENTS, *WORKER_INSTRUMENTS, *AUTOSCALER_INSTRUMENTS)


def _metric(instrument: Instrument) -> list[str]:
    facts = [instrument.kind.value, f"unit {instrument.unit or 'none'}"]
    facts += [f"buckets {' '.join(map(str, instrument.buckets))}"] if instrument.buckets else []
    facts += [f"label {label}" for label in instrument.labels]
    return facts + [f"sample {sample}" for sample in instrument.samples]


def _values() -> dict[str, list[str]]:
    """Values of flags that the loader knows as text only."""
    return {
        "roles": list(ROLE_NAMES), "transports": list(TRANSPORTS), "priorities": list(PRIORITIES), "models": list(KNOWN_MODELS),
        "devices": list(DEVICES), "traces": list(READERS), "lengths": list(KINDS), "instruction tiers": [t.name for t in TIERS],
    }  # fmt: skip


def _api() -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """Methods of all services; messages and enums of pdmesh.v1."""
    methods: dict[str, list[str]] = {}
    types: dict[str, list[str]] = {}
    for file in map(_proto, [module.DESCRIPTOR for module in (*API_FILES, *FOREIGN_FILES)]):
        for service in file.service:
            for method in service.method:
                sent = f"takes {'stream ' * method.client_streaming}{method.input_type}"
                answered = f"answers {'stream ' * method.server_streaming}{method.output_type}"
                methods[f"{file.package}.{service.name}/{method.name}"] = [sent, answered]
    for file in map(_proto, [module.DESCRIPTOR for module in API_FILES]):
        types |= {f"{file.package}.{message.name}": [_field(field) for field in message.field] for message in file.message_type}
        for kind in file.enum_type:
            types[f"{file.package}.{kind.name}"] = [f"{value.number} {value.name}" for value in kind.value]
    return methods, types


def _proto(descriptor: FileDescriptor) -> FileDescriptorProto:
    proto = FileDescriptorProto()
    descriptor.CopyToProto(proto)
    return proto


def _field(field: FieldDescriptorProto) -> str:
    kind = field.type_name or FieldDescriptorProto.Type.Name(field.type).removeprefix("TYPE_").lower()
    label = FieldDescriptorProto.Label.Name(field.label).removeprefix("LABEL_").lower()
    presence = " explicit" * (field.proto3_optional or field.HasField("oneof_index"))
    return f"{field.number} {field.name}: {label}{presence} {kind}"


def _client() -> Iterator[tuple[str, list[str]]]:
    """What `pdmesh.client` and `pdmesh.errors` export, what calls take and give. A module that moves has another name."""
    for module in (client, errors):
        for name in module.__all__:
            yield from _exported(f"{module.__name__}.{name}", getattr(module, name))
    for name, found in vars(client_types).items():
        if inspect.isclass(found) and found.__module__ == client_types.__name__ and name not in client.__all__:
            yield from _exported(name, found)
    for cls in (Stream, AsyncStream):
        yield from _exported(cls.__name__, cls, is_made_by_users=False)


def _exported(name: str, found: object, *, is_made_by_users: bool = True) -> Iterator[tuple[str, list[str]]]:
    """A class with its methods, or a function."""
    if isinstance(found, type) and is_typeddict(found):
        yield name, sorted(inspect.get_annotations(found))
    elif isinstance(found, type) and issubclass(found, enum.Enum):
        yield name, [f"{member.name} {member.value}" for member in found]
    elif not isinstance(found, type):
        yield name, _parameters(found) if callable(found) else []
    else:
        yield name, _parameters(found) if is_made_by_users else []
        fields = {field.name for field in dataclasses.fields(found)} if dataclasses.is_dataclass(found) else set[str]()
        for attribute in sorted({*dir(found)} - {*dir(BaseException)} - fields):
            if not attribute.startswith("_") or attribute in _PROTOCOLS:
                value = inspect.getattr_static(found, attribute)
                yield f"{name}.{attribute}", _parameters(value) if inspect.isfunction(value) else []


def _parameters(called: object) -> list[str]:
    assert callable(called)
    facts = ["async"] if inspect.iscoroutinefunction(called) else []
    for place, each in enumerate(inspect.signature(called).parameters.values()):
        text = str(each.replace(annotation=inspect.Parameter.empty))
        facts.append(f"keyword {text}" if each.kind is inspect.Parameter.KEYWORD_ONLY else f"{place} {text}")
    return facts


def _build_names() -> Names:
    """Of make, pip, docker, kubectl -k and python -m."""
    make, docker = (ROOT / "Makefile").read_text(encoding="utf-8"), (ROOT / "Dockerfile").read_text(encoding="utf-8")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    own = {"MAKE", "MAKEFILE_LIST", *re.findall(r"^([A-Z_]+)\s*:?=", make, re.MULTILINE)}
    given = {*re.findall(r"\$\(([A-Z_]+)\)", make)} - own
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    shown = make + "".join(page.read_text(encoding="utf-8") for page in pages)
    programs = filter(source_names.is_program, re.findall(r"python3? -m ([a-z0-9_.]*[a-z0-9_])", shown))
    bare = [name.removeprefix("pdmesh.").removeprefix("tools.") for name in programs]
    return {
        "make targets": _bare(re.findall(r"^([a-z][a-z0-9-]*):(?!=)", make, re.MULTILINE)),
        "make variables": _bare(given),
        "scripts": _bare(project["scripts"]),
        "extras": {
            extra: sorted(re.split(r"[<>=]", package)[0] for package in packages)
            for extra, packages in {"": project["dependencies"], **project["optional-dependencies"]}.items()
        },
        "docker stages and arguments": _bare(re.findall(r"^(?:FROM .* AS|ARG) (\w[\w-]*)", docker, re.MULTILINE)),
        "k8s folders": _bare(str(path.parent.relative_to(ROOT)) for path in (ROOT / "k8s").rglob("kustomization.yaml")),
        # `python -m worker` may become `python -m pdmesh.worker`.
        "programs of python -m": _bare(MOVED.get(name, name) for name in bare),
    }


def main() -> None:
    """Shows what is gone, or with `--write` records what is there."""
    if "--write" not in sys.argv[1:]:
        print("\n".join(gone(recorded(), collect())) or "all names are there")
        return
    sections = []
    for section, names in collect().items():
        lines = ",\n".join(f"    {json.dumps(name)}: {json.dumps(facts)}" for name, facts in names.items())
        sections.append(f"  {json.dumps(section)}: {{\n{lines}\n  }}")
    FILE.write_text("{\n" + ",\n".join(sections) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
