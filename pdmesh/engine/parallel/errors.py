"""What can go wrong between the ranks of one engine."""

from __future__ import annotations

from pdmesh.engine.errors import EngineError


class RankFailed(EngineError):
    """A rank has ended, is silent or could not start. The others wait for it in vain: the process must not go on serving."""


class ExchangeFailed(EngineError):
    """An exchange between ranks broke or took too long; who is at fault is not known here."""
