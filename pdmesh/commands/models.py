"""`pdmesh models`: lists what the mesh serves and what can be fetched by name, and fetches it."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from typing import Literal

from pdmesh.commands.options import Connection, flat
from pdmesh.errors import MeshError
from pdmesh.models import registry
from pdmesh.models.catalogue import cache_folder
from pdmesh.terminal import show, size, table


@dataclass(frozen=True)
class Options:
    """Models: pdmesh models list, or pdmesh models fetch smollm2-135m-instruct (a known name, a .gguf file or a name of the
    hub)."""

    action: Literal["list", "fetch"] = field(
        default="list", metadata={"help": "what to do, also as a bare word", "positional": True}
    )
    name: str = field(default=registry.DEFAULT_MODEL, metadata={"help": "what to fetch, also as a bare word", "positional": True})
    offline: bool = field(default=False, metadata={"help": "take a model of the hub from its cache alone"})
    json: bool = field(default=False, metadata={"help": "write JSON"})
    connection: Connection = field(default_factory=lambda: Connection(resume_timeout_s=0.5), metadata=flat())


def run(options: Options) -> int:
    """Run the command; return 0 when the model is there, or the list is shown."""
    return _fetch(options) if options.action == "fetch" else _list(options)


def _fetch(options: Options) -> int:
    try:
        folder = registry.ensure_model(options.name, offline=options.offline)
    except registry.ModelError as error:
        print(f"pdmesh models: {error}", file=sys.stderr)
        return 1
    print(json.dumps({"name": registry.model_name(options.name), "folder": str(folder)}) if options.json else folder)
    return 0


def _list(options: Options) -> int:
    known = [
        {
            "name": model.name,
            "title": model.title,
            "licence": model.licence,
            "download_bytes": model.source.num_bytes,
            "fetched": (cache_folder() / "models" / model.name).is_dir(),
        }
        for model in registry.KNOWN_MODELS.values()
    ]
    served = _served(options)
    if options.json:
        print(json.dumps({"known": known, "served": served}))
        return 0
    rows = [
        (str(m["name"]), str(m["licence"]), size(model.source.num_bytes), "yes" if m["fetched"] else "no", str(m["title"]))
        for m, model in zip(known, registry.KNOWN_MODELS.values(), strict=True)
    ]
    known_models = table(("KNOWN MODEL", "LICENCE", "DOWNLOAD", "FETCHED", "WHAT"), rows)
    show(known_models, "", f"served by {options.connection.router}: {_served_text(served)}")
    return 0


def _served(options: Options) -> list[dict[str, object]] | None:
    """Return the models of the mesh; None if none answers, which is not an error here."""
    try:
        with options.connection.client() as client:
            found = client.list_models(timeout=options.connection.timeout)
    except MeshError:
        return None
    return [
        {
            "name": model.name,
            "max_context": model.max_context,
            "num_prefill_workers": model.num_prefill_workers,
            "num_decode_workers": model.num_decode_workers,
            "sampling_defaults": dict(model.sampling_defaults),
        }
        for model in found
    ]


def _served_text(served: list[dict[str, object]] | None) -> str:
    if served is None:
        return "no mesh answers there"
    return (
        ", ".join(f"{m['name']} ({m['num_prefill_workers']} prefill, {m['num_decode_workers']} decode)" for m in served) or "none"
    )
