"""Blocks in a Redis that workers share, and the bound of what a mesh has there, kept by scripts: they run one at a time.

    string      pdmesh:<mesh>:kv:<block>   a header and the content, as in a file (block_file.py); expires
    sorted set  pdmesh:<mesh>:kv:used      block → when it was used, or until when it is kept, in seconds of Redis's clock
    hash        pdmesh:<mesh>:kv:sizes     block → bytes of its value; "" → of all together

A block is named <identity>:<root>:<hash>, in hex. The least recently used goes first, and a block counts as used just before the
one that it follows, so a chain is given up from its end.

Values that others removed, or that Redis evicted, are dropped from the set when they are asked for. Where one of the two
keys is lost, both begin anew; what is then not counted any more expires.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from redis import Redis
from redis.backoff import NoBackoff
from redis.commands.core import Script
from redis.exceptions import OutOfMemoryError, ResponseError
from redis.retry import Retry

KEEP_S = 86_400
"""How long a block stays that nothing uses, also where no worker is left to remove it."""
NAMES_PER_CALL = 512
"""So many names are asked for at once: Redis does nothing else meanwhile."""

EVICTIONS_PER_CALL = 100

_COMMON = """
local used, sizes, prefix, life = KEYS[1], KEYS[2], ARGV[1], tonumber(ARGV[2])
local clock = redis.call('TIME')
local now = clock[1] + clock[2] / 1e6
local function exact(seconds) return string.format('%.6f', seconds) end
local function total() return tonumber(redis.call('HGET', sizes, '') or 0) end
local function drop(block)
  redis.call('UNLINK', prefix .. block)
  redis.call('ZREM', used, block)
  local size = redis.call('HGET', sizes, block)
  if size then
    redis.call('HDEL', sizes, block)
    redis.call('HINCRBY', sizes, '', -size)
  end
end
local function mend()
  if redis.call('HLEN', sizes) ~= redis.call('ZCARD', used) + 1 then redis.call('UNLINK', used, sizes) end
end
local function evict(most, spared, limit)
  local gone = {}
  while total() > most do
    local oldest = redis.call('ZRANGE', used, 0, 0)[1]
    if not oldest or oldest == spared or #gone == limit then return gone, false end
    drop(oldest)
    gone[#gone + 1] = oldest
  end
  return gone, true
end
local function renew(seconds)
  for _, key in ipairs(KEYS) do
    if redis.call('TTL', key) < seconds then redis.call('EXPIRE', key, seconds) end
  end
end
"""

# A Redis without memory refuses ZADD; a block is then found all the same.
_FIND = (
    _COMMON
    + """
local keep, found = tonumber(ARGV[3]), {}
mend()
for index = 4, #ARGV do
  local block, when = ARGV[index], now + keep - index * 1e-6
  local before = redis.call('ZSCORE', used, block)
  local size = redis.call('HGET', sizes, block)
  if before and size and redis.pcall('STRLEN', prefix .. block) == tonumber(size) then
    if when > tonumber(before) then
      redis.pcall('ZADD', used, exact(when), block)
      redis.call('EXPIRE', prefix .. block, life + keep)
    end
    found[#found + 1] = 1
  else
    drop(block)
    found[#found + 1] = 0
  end
end
renew(life + keep)
return found
"""
)

# The first HINCRBY changes nothing: a Redis without memory refuses it, and lets a script go on that has written already.
_PUT = (
    _COMMON
    + """
local most, keep, limit = tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5])
local block, parent, content = ARGV[6], ARGV[7], ARGV[8]
redis.call('HINCRBY', sizes, '', 0)
mend()
if parent ~= '' and not redis.call('ZSCORE', used, parent) then return {0, total(), {}} end
drop(block)
for _, stale in ipairs(redis.call('ZRANGEBYSCORE', used, '-inf', exact(now - life), 'LIMIT', 0, limit)) do drop(stale) end
local gone, has_room = evict(most - #content, parent, limit)
if not has_room then return {0, total(), gone} end
redis.call('SET', prefix .. block, content, 'EX', life + keep)
local when, before = now + keep, redis.call('ZSCORE', used, parent)
if before then when = math.min(when, before - 1e-6) end
redis.call('ZADD', used, exact(when), block)
redis.call('HSET', sizes, block, #content)
redis.call('HINCRBY', sizes, '', #content)
renew(life + keep)
return {1, total(), gone}
"""
)

_TRIM = (
    _COMMON
    + """
local gone, is_done = evict(tonumber(ARGV[3]), '', tonumber(ARGV[4]))
return {is_done and 1 or 0, total(), gone}
"""
)

_DROP = (
    _COMMON
    + """
drop(ARGV[3])
return 1
"""
)


class StoreRefused(Exception):
    """Raised where Redis does not take a block."""


class StoreFull(StoreRefused):
    """Raised where Redis has no memory left."""


@dataclass(frozen=True)
class Change:
    """Hold what a script did: whether all that it should, the bytes of the mesh's blocks then, and blocks that had to go."""

    is_done: bool
    num_bytes: int
    gone: tuple[str, ...]


class RedisBlocks:
    """Talk to Redis. Every method may be called on any thread, waits at most `timeout_s` for a byte from Redis, and raises what
    the client raises: RedisError, OSError, and others where something that is no Redis answers."""

    def __init__(self, url: str, mesh: str, timeout_s: float) -> None:
        """Create the client; it connects at the first call. Raises ValueError for a malformed URL."""
        self._redis = Redis.from_url(
            url,
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
            retry=Retry(NoBackoff(), 0),
            protocol=2,
            decode_responses=False,
        )
        self._prefix = f"pdmesh:{mesh}:kv:"
        self._keys = [f"{self._prefix}used", f"{self._prefix}sizes"]
        register = self._redis.register_script
        self._find, self._put, self._trim, self._drop = register(_FIND), register(_PUT), register(_TRIM), register(_DROP)

    def find(self, blocks: Sequence[str], keep_s: float, *, all_of_them: bool) -> list[bool]:
        """Return of each block whether it is there; those that are count as used. Unless `all_of_them` are asked for, it may stop
        after the first that is not."""
        found: list[bool] = []
        for start in range(0, len(blocks), NAMES_PER_CALL):
            names = blocks[start : start + NAMES_PER_CALL]
            answer = self._find(self._keys, [self._prefix, KEEP_S, math.ceil(keep_s), *names])
            found += [bool(each) for each in cast("list[int]", answer)]
            if len(found) != start + len(names):
                raise ResponseError(f"the answer has {len(found) - start} entries for {len(names)} names")
            if not all_of_them and not all(found):
                break
        return found

    def put(self, block: str, parent: str, value: bytes, keep_s: float, max_bytes: int) -> Change:
        """Write a block, and remove the least recently used until the mesh has at most `max_bytes` there; it is not done where
        those are too many at once, or where its parent (empty: it has none) is not there or would be next. Raises
        StoreRefused."""
        try:
            return self._change(self._put, max_bytes, math.ceil(keep_s), EVICTIONS_PER_CALL, block, parent, value)
        except OutOfMemoryError as error:
            raise StoreFull(str(error)) from error
        except ResponseError as error:
            if "OOM" in str(error):  # as an error of a script, before Redis 7
                raise StoreFull(str(error)) from error
            raise StoreRefused(str(error)) from error

    def trim(self, max_bytes: int) -> Change:
        """Remove the least recently used until the mesh has at most `max_bytes` there, a limited number of them."""
        return self._change(self._trim, max_bytes, EVICTIONS_PER_CALL)

    def _change(self, script: Script, *arguments: str | bytes | int) -> Change:
        is_done, num_bytes, gone = cast("tuple[int, int, list[bytes]]", script(self._keys, [self._prefix, KEEP_S, *arguments]))
        return Change(bool(is_done), int(num_bytes), tuple(each.decode() for each in gone))

    def get(self, blocks: Sequence[str], max_bytes: int) -> list[bytes | ResponseError]:
        """Return what is stored under these names, one byte more than `max_bytes` where it is longer; nothing stored: empty. An
        error in its place: it is no string."""
        pipeline = self._redis.pipeline(transaction=False)
        for block in blocks:
            pipeline.getrange(self._prefix + block, 0, max_bytes)
        return cast("list[bytes | ResponseError]", pipeline.execute(raise_on_error=False))

    def drop(self, block: str) -> None:
        """Remove a block."""
        self._drop(self._keys, [self._prefix, KEEP_S, block])

    def close(self) -> None:
        """Close the connections; calls on other threads end with an error."""
        self._redis.connection_pool.disconnect(inuse_connections=True)
