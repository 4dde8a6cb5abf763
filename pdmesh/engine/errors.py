"""Errors between the engine and its caller, a type for each. "No room" is not among them: that is None or False."""

from __future__ import annotations

from typing import ClassVar


class EngineError(Exception):
    """Base of all errors that the engine raises on purpose."""


class InvalidRequest(EngineError, ValueError):
    """The request contradicts itself or what the engine already knows about it. The message names the field."""


class NotLoaded(EngineError):
    """The request needs something that the engine does not have, or not any more; `field` names it, as messages do."""

    field: ClassVar[str]


class UnknownAdapter(NotLoaded):
    """The request's adapter is not loaded, or is being unloaded."""

    field = "request.adapter"


class UnknownWeights(NotLoaded):
    """The request is to be computed with weights that have been replaced."""

    field = "identity.weights_hash"


class WeightsRefused(EngineError, ValueError):
    """Other weights cannot be taken: they are of another model, or something here depends on the present ones. The message says
    what."""


class SleepRefused(EngineError):
    """This engine cannot give its memory back. The message says why, and what to do instead."""


class RequestTooLarge(EngineError):
    """The request can never fit this engine's context, pool of blocks or number of sequences. Waiting does not help."""


class AdapterRefused(EngineError, ValueError):
    """An adapter cannot be loaded now: its name or all places are taken. The message says what to do."""


class DuplicateRequest(EngineError):
    """A request with this id is in the engine already."""


class UnknownRequest(EngineError, KeyError):
    """No request with this id is in the engine: never seen, finished, or released."""

    __str__ = Exception.__str__


class InvalidState(EngineError):
    """The request is not in the state that the call needs."""


class EngineStopped(EngineError):
    """The engine's thread has ended or is ending; nothing runs on it any more."""


class IntegrityError(EngineError):
    """The bookkeeping of blocks contradicts itself: a bug. The process must not go on serving."""
