"""`DELETE /v1/sessions/{session_id}`: workers give up what they retain for a session. The path is pdmesh's own."""

from __future__ import annotations

from typing import Literal

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from pdmesh.v1 import mesh_pb2
from router.api.frontend import Frontend
from router.api.http.body import HttpSettings, json_response
from router.api.http.headers import authorization_of, options_of, request_id_of
from router.api.http.openapi import Endpoint
from router.api.http.types import AnswerBody
from router.auth import identity


class ReleasedSession(AnswerBody):
    """What was released."""

    id: str
    """The session."""
    object: Literal["session.released"]
    num_blocks: int
    """Blocks that workers retained for it."""
    num_workers: int
    """Workers that retained some of them."""
    num_unreachable: int
    """Workers that did not answer: what they retain is released when its time is over."""


class _Handlers:
    def __init__(self, frontend: Frontend, settings: HttpSettings) -> None:
        self._frontend = frontend
        self._settings = settings

    async def release(self, request: Request) -> Response:
        """Handle DELETE: of all models, or of the one that the query names as `model`."""
        identity.authenticate(self._settings.keys, authorization_of(request.headers))
        options = options_of(request.headers, request_id_of(request.scope))
        session_id, model = request.path_params["session_id"], request.query_params.get("model", "")
        wanted = mesh_pb2.ReleaseSessionRequest(session_id=session_id, tenant=options.tenant, model=model)
        released = await self._frontend.release_session(wanted)
        counts = {field.name: getattr(released, field.name) for field in released.DESCRIPTOR.fields}
        return json_response({"id": session_id, "object": "session.released", **counts})


def routes(frontend: Frontend, settings: HttpSettings) -> list[Route]:
    """Return the one route."""
    handlers = _Handlers(frontend, settings)
    what = "Release what is retained for a session; ?model= names the model, else it is all of them"
    return [
        Endpoint(
            "/v1/sessions/{session_id:path}", handlers.release, what, method="DELETE", answer=ReleasedSession, has_options=True
        )
    ]
