"""Responses that are kept in Redis for the next turn: `previous_response_id`, references to items, GET and DELETE.

    hash        pdmesh:<mesh>:responses:<tenant>        id → JSON: the response, and the conversation before it
    sorted set  pdmesh:<mesh>:responses-due:<tenant>    id → when it goes, in milliseconds of Redis's clock

The tenant is hashed, as it may hold any character; there are two keys for each, because the registry scans all keys of the
database. A response holds its whole conversation: nothing depends on the responses before it, which may have gone. Within the
bounds of a tenant the oldest goes first.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal, NoReturn, cast

from pydantic import Field
from redis.asyncio import Redis

from pdmesh.runtime.errors import MeshError, Unavailable
from pdmesh.runtime.registry import records
from pdmesh.runtime.registry.redis_link import RedisLink
from router.api.http.body import parsed
from router.api.http.errors import HttpError
from router.api.http.fields import JsonObject
from router.api.http.types import Body
from router.api.responses.items import Item, Located
from router.api.responses.requests import Call, Kept
from router.api.validation import refuse

MAX_NAMED_RESPONSES = 64
HINT = "send the whole conversation as input"
_RESPONSE_ID = re.compile(r"resp_[0-9a-f]{24}")
_ITEM_ID = re.compile(r"(?:rs|msg|fc)_([0-9a-f]{24})_[0-9]{1,4}")

logger = logging.getLogger(__name__)

_NOW = """
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
"""
# KEYS: hash, sorted set. ARGV: id, value, time to live in ms, most responses, most bytes. Drops what is due, then the oldest.
_PUT = (
    _NOW
    + """
for _, id in ipairs(redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', now)) do
  redis.call('HDEL', KEYS[1], id)
  redis.call('ZREM', KEYS[2], id)
end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
redis.call('ZADD', KEYS[2], now + ARGV[3], ARGV[1])
local ids = redis.call('ZRANGE', KEYS[2], 0, -1)
local total = 0
for _, id in ipairs(ids) do total = total + redis.call('HSTRLEN', KEYS[1], id) end
local left = #ids
for _, id in ipairs(ids) do
  if left <= tonumber(ARGV[4]) and total <= tonumber(ARGV[5]) then break end
  if id ~= ARGV[1] then
    total = total - redis.call('HSTRLEN', KEYS[1], id)
    left = left - 1
    redis.call('HDEL', KEYS[1], id)
    redis.call('ZREM', KEYS[2], id)
  end
end
redis.call('PEXPIRE', KEYS[1], ARGV[3])
redis.call('PEXPIRE', KEYS[2], ARGV[3])
return left
"""
)
# KEYS: as above. ARGV: id. Returns the value; "" where there is none, or none any more.
_GET = (
    _NOW
    + """
local due = redis.call('ZSCORE', KEYS[2], ARGV[1])
if not due or tonumber(due) <= now then return '' end
return redis.call('HGET', KEYS[1], ARGV[1]) or ''
"""
)
_DELETE = """
redis.call('ZREM', KEYS[2], ARGV[1])
return redis.call('HDEL', KEYS[1], ARGV[1])
"""


@dataclass(frozen=True)
class KeepSettings:
    """Hold how long responses are kept, and how many of each tenant, with how many bytes together."""

    ttl_s: int
    max_responses: int
    max_bytes: int


class _Output(Body):
    model_config = Body.model_config | {"extra": "ignore"}
    id: str
    output: list[Item]


class _Record(Body):
    version: Literal[1]
    response: _Output
    input: Annotated[list[Item], Field(min_length=1)]


@dataclass(frozen=True)
class KeptResponse:
    """Hold a response and the items that it answers, as JSON, and both as types."""

    response: JsonObject
    items: tuple[tuple[JsonObject, Located], ...]

    def by_id(self) -> dict[str, tuple[JsonObject, Located]]:
        """Return the items that have ids."""
        return {item_id: item for item in self.items if isinstance(item_id := item[0].get("id"), str)}


class KeptResponses:
    """Reads and writes the kept responses of a mesh."""

    def __init__(self, url: str, mesh: str, settings: KeepSettings) -> None:
        """Create the store. It connects at its first use. Raises ConfigError for a malformed URL."""
        self._link = RedisLink(url)
        self._prefix = f"pdmesh:{records.check_id('mesh', mesh)}"
        self._settings = settings

    async def close(self) -> None:
        """Close the connection; what is kept stays."""
        await self._link.close()

    async def put(self, tenant: str, response: JsonObject, conversation: list[JsonObject]) -> bool:
        """Keep a response. False: Redis did not take it, or it is larger than all that a tenant may have."""
        value = json.dumps({"version": 1, "response": response, "input": conversation}, separators=(",", ":"))
        if len(value) > self._settings.max_bytes:
            logger.warning("a response of %d bytes is not kept (http_keep_responses_bytes)", len(value))
            return False
        limits = self._settings
        wanted = (str(response["id"]), value, limits.ttl_s * 1000, limits.max_responses, limits.max_bytes)
        return await self._link.call(lambda redis: self._eval(redis, _PUT, tenant, *wanted)) is not None

    async def get(self, tenant: str, response_id: str) -> KeptResponse | None:
        """Return a response of this tenant; None: there is none. Raises Unavailable; MeshError for one that cannot be read."""
        if not _RESPONSE_ID.fullmatch(response_id):
            return None
        value = cast("bytes", await self._answered(_GET, tenant, response_id))
        if not value:
            return None
        try:
            return await parsed(partial(_read, response_id), value)  # a large one in a thread, as bodies of requests
        except (HttpError, ValueError, RecursionError) as error:
            raise _unreadable(response_id, error) from error

    async def delete(self, tenant: str, response_id: str) -> bool:
        """Delete a response of this tenant. False: there is none. Raises Unavailable."""
        return bool(_RESPONSE_ID.fullmatch(response_id)) and bool(await self._answered(_DELETE, tenant, response_id))

    async def check(self) -> None:
        """Raise Unavailable unless Redis answers."""
        if await self._link.call(_ping) is None:
            raise _silent("store")

    async def _answered(self, script: str, tenant: str, response_id: str) -> object:
        found = await self._link.call(lambda redis: self._eval(redis, script, tenant, response_id))
        if found is None:
            raise _silent("previous_response_id")
        return found

    async def _eval(self, redis: Redis, script: str, tenant: str, *arguments: str | int) -> object:
        owner = hashlib.sha256(tenant.encode()).hexdigest()[:32]
        keys = f"{self._prefix}:responses:{owner}", f"{self._prefix}:responses-due:{owner}"
        return await cast("Awaitable[object]", redis.eval(script, 2, *keys, *cast("tuple[str, ...]", arguments)))


async def _ping(redis: Redis) -> bool:
    await cast("Awaitable[Any]", redis.ping())
    return True


def _silent(field: str) -> Unavailable:
    error = Unavailable(f"{field}: responses are kept in Redis, which does not answer; try again, or {HINT} with store: false")
    error.field = field
    return error


def _read(response_id: str, sent: JsonObject) -> KeptResponse:
    """Return what a value holds. Raises ValueError for one that no router wrote."""
    record = _Record.model_validate(sent)
    if record.response.id != response_id:
        raise ValueError(f"it is of {record.response.id[:80]!r}")
    response = cast("JsonObject", sent["response"])
    shown = [*cast("list[JsonObject]", sent["input"]), *cast("list[JsonObject]", response["output"])]
    located = [Located("previous_response_id", item) for item in (*record.input, *record.response.output)]
    return KeptResponse(response, tuple(zip(shown, located, strict=True)))


def _unreadable(response_id: str, error: Exception) -> MeshError:
    problem, path = str(error).partition("\n")[0], f"/v1/responses/{response_id}"
    message = f"the kept response {response_id} cannot be read ({problem}); delete it (DELETE {path}), and {HINT}"
    return MeshError(message, field="previous_response_id")


async def completed(call: Call, tenant: str, store: KeptResponses | None) -> Call:
    """Return a call with what it needs of kept responses. Raises HttpError (404), MeshError."""
    previous_id = call.body.previous_response_id
    if not call.named and previous_id is None:
        return call
    if store is None:
        _refuse_kept("previous_response_id" if previous_id is not None else call.named[0][0])
    before = None if previous_id is None else await _previous(store, tenant, previous_id)
    named = await _named(store, tenant, before, call.named)
    return call.with_kept(Kept(before.items if before else (), named))


def _refuse_kept(field: str) -> NoReturn:
    flag = "start the router with --http-keep-responses-s"
    refuse(field, f"responses are not kept here; {HINT}, which agents do with store: false, or {flag}")


async def _previous(store: KeptResponses, tenant: str, response_id: str) -> KeptResponse:
    found = await store.get(tenant, response_id)
    if found is None:
        message = f"previous_response_id: there is no response {response_id[:80]!r}, or none any more; {HINT}"
        raise HttpError(404, message, param="previous_response_id", code="previous_response_not_found")
    return found


async def _named(
    store: KeptResponses, tenant: str, before: KeptResponse | None, wanted: Sequence[tuple[str, str]]
) -> dict[str, tuple[JsonObject, Located]]:
    """Return the items that a request names, by id; `wanted` also says where. The response of the latest holds its whole
    conversation, and so most often all of them."""
    found = before.by_id() if before is not None else {}
    num_read = 0
    for path, item_id in reversed(wanted):
        match = _ITEM_ID.fullmatch(item_id)
        if item_id not in found and match is not None:
            num_read += 1
            if num_read > MAX_NAMED_RESPONSES:
                refuse(path, f"names an item of yet another response; those of {MAX_NAMED_RESPONSES} are allowed, so {HINT}")
            kept = await store.get(tenant, f"resp_{match[1]}")
            found = {**(kept.by_id() if kept is not None else {}), **found}
        if item_id not in found:
            raise HttpError(404, f"{path}: there is no item {item_id[:80]!r}, or none any more; send the item itself", param=path)
    return found
