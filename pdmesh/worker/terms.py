"""On which terms this worker hands KV over and takes requests: what both its services, and the transfers, are told of it."""

from __future__ import annotations

from dataclasses import dataclass

from pdmesh.engine.engine import Engine
from pdmesh.runtime.files import cache_root_of
from pdmesh.text.grammar import GrammarCompiler
from pdmesh.v1 import common_pb2
from pdmesh.worker.description import identity_of, layout_of
from pdmesh.worker.token_request import TokenRequestTranslator


@dataclass(frozen=True)
class Terms:
    """`identity` must be equal on both ends of a hand-off, `layout` convertible; `translate` makes the engine's requests."""

    identity: common_pb2.Identity
    layout: common_pb2.KVLayout
    translate: TokenRequestTranslator

    @classmethod
    def of(cls, engine: Engine, model: str, grammars: GrammarCompiler | None) -> Terms:
        """Of a worker that serves this engine as `model`."""
        identity, layout = identity_of(engine, model), layout_of(engine)

        def cache_root(tenant: str, cache_salt: str) -> bytes:
            return cache_root_of(identity, layout.kv_dtype, tenant=tenant, cache_salt=cache_salt)

        return cls(identity, layout, TokenRequestTranslator(identity.model, cache_root, grammars))
