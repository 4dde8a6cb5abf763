"""Scales Deployments. One round of the loop, as seen here:

1. `leads`: the Lease, renewed in the background (`elector.py`).
2. `observe`: each Deployment is read. Replicas that we have not asked for were set by a person and are held (`ledger.py`).
3. `scale`: the request is recorded (`StateStore`), then the scale subresource is patched, provided that the Deployment is as it
   was read: a change that has not been seen is never overwritten. An Event gives the reason.
"""

import asyncio
import json
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

from pdmesh.autoscaler.forecasting.forecast import State
from pdmesh.autoscaler.kubernetes import ledger
from pdmesh.autoscaler.kubernetes.api import Api, ApiError, ConflictError, MissingError, Object, open_api
from pdmesh.autoscaler.kubernetes.elector import Elector, Ownership
from pdmesh.autoscaler.kubernetes.events import Events, Subject
from pdmesh.autoscaler.kubernetes.ledger import Entry, Held
from pdmesh.autoscaler.kubernetes.objects import Seen, seen_of
from pdmesh.autoscaler.kubernetes.settings import KubernetesSettings
from pdmesh.autoscaler.platform import Asked, Platform, PlatformError
from pdmesh.autoscaler.views import Hold, PoolDecision, PoolName

# The state that a leader leaves for the next one, in a ConfigMap. A former leader cannot overwrite what came after it.


MAX_BYTES = 400_000
"""Limit of one value; etcd takes a megabyte and a half for a whole object."""

logger = logging.getLogger(__name__)


class StateStore:
    """Store JSON values by key. `leads` is checked before each write. `ownership`: of the ConfigMap, when it is made."""

    def __init__(
        self, api: Api, namespace: str, name: str, leads: Callable[[], bool], ownership: Ownership | None = None
    ) -> None:
        self._api = api
        self._maps = f"/api/v1/namespaces/{namespace}/configmaps"
        self._name = name
        self._leads = leads
        self._ownership = ownership
        self._version: str | None = None

    async def load(self, key: str) -> object:
        """Return the value; None if nothing was saved or it cannot be read. Raises ApiError."""
        try:
            found = await self._api.get(f"{self._maps}/{self._name}")
        except MissingError:
            self._version = None
            return None
        self._version = _version(found)
        try:
            value: object = json.loads((found.get("data") or {}).get(key, "null"))
            json.dumps(value, allow_nan=False)  # Python accepts infinities, which no caller expects
        except (ValueError, RecursionError) as error:
            logger.warning("ConfigMap %s: %s cannot be read (%s): starting afresh", self._name, key, error)
            return None
        return value

    async def save(self, key: str, value: object) -> None:
        """Save a value. Raises PlatformError."""
        text = self._text(key, value)
        try:
            await self._write({key: text})
        except (ConflictError, MissingError):  # edited or deleted by someone, or another candidate leads by now
            await self._read_version()
            await self._write({key: text})

    async def _write(self, data: dict[str, str]) -> None:
        if not self._leads():
            raise PlatformError(f"ConfigMap {self._name}: not written, as this process no longer leads")
        if self._version is None:
            body = self._body(data)
            body["metadata"] |= await self._ownership.metadata() if self._ownership is not None else {}
            self._version = _version(await self._api.create(self._maps, body))
        else:
            self._version = _version(await self._api.patch(f"{self._maps}/{self._name}", self._body(data)))

    async def _read_version(self) -> None:
        try:
            self._version = _version(await self._api.get(f"{self._maps}/{self._name}"))
        except MissingError:
            self._version = None

    def _body(self, data: dict[str, str]) -> Object:
        metadata: Object = {"name": self._name, "labels": {"app.kubernetes.io/part-of": "pdmesh"}}
        if self._version is not None:
            metadata["resourceVersion"] = self._version
        return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data}

    def _text(self, key: str, value: object) -> str:
        try:
            text = json.dumps(value, allow_nan=False, separators=(",", ":"))
        except (TypeError, ValueError) as error:
            raise ApiError(f"ConfigMap {self._name}", f"{key} cannot be written as JSON: {error}") from error
        if len(text) > MAX_BYTES:
            raise ApiError(f"ConfigMap {self._name}", f"{key} has {len(text)} bytes, more than {MAX_BYTES}: it is not saved")
        return text


def _version(found: Object) -> str:
    return str(found["metadata"]["resourceVersion"])


MAX_TRIES = 3
"""Attempts of one change; a Deployment whose pods come and go changes often by itself."""
_ASKED, _POLICY = "asked.json", "policy.json"


def open_platform(settings: KubernetesSettings) -> Platform:
    """Return the platform; sends nothing yet. Raises ConfigError."""
    namespace = settings.own_namespace()
    return KubernetesPlatform(open_api(settings), namespace, settings)


class KubernetesPlatform:
    """Implement `pdmesh.autoscaler.platform.Platform` on Deployments. `wall` is the time that all machines share, in seconds
    since 1970."""

    def __init__(self, api: Api, namespace: str, settings: KubernetesSettings, wall: Callable[[], float] = time.time) -> None:
        self._api = api
        self._deployments = f"/apis/apps/v1/namespaces/{namespace}/deployments"
        self._settings = settings
        self._wall = wall
        self._elector = Elector(api, namespace, settings)
        self._state = StateStore(api, namespace, settings.state, lambda: self._elector.leads, Ownership(api, namespace, settings))
        self._events = Events(api, namespace, self._elector.identity)
        self._seen: dict[PoolName, Seen] = {}
        self._entries: dict[PoolName, Entry] = {}
        self._term = -1
        self._saved: object = None
        self._closed = False

    async def leads(self, now_s: float) -> bool:
        return await self._elector.ask()

    async def observe(self, now_s: float) -> Mapping[PoolName, Asked]:
        await self._begin_term()
        pools = list(self._settings.deployments)
        await asyncio.gather(*(self._look(name) for name in pools))
        if self._elector.leads:
            await self._save_entries()
        return {name: self._asked(name, now_s) for name in pools}

    async def scale(self, decision: PoolDecision, replicas: int, now_s: float) -> None:
        name = decision.name
        if name not in self._seen:
            raise PlatformError(f"{name}: its Deployment has not been read yet; observe comes first")
        for _ in range(MAX_TRIES):
            before = self._seen[name].replicas
            if before == replicas:
                return
            if await self._set(name, replicas):
                await self._tell(name, before, replicas, decision.reason)
                return
            await self._look_again(name)
        raise PlatformError(f"{name}: the Deployment {self._seen[name].name} keeps changing; the next round tries again")

    async def starts_failed(self, name: PoolName, problem: str) -> None:
        note = f"{problem}; see kubectl describe pod"
        logger.warning("%s: %s", name, note)
        await self._events.tell(self._subject(name), "FailedStart", note, action="Start", kind="Warning")

    async def load(self) -> State | None:
        saved = await self._state.load(_POLICY)
        return saved if isinstance(saved, dict) else None

    async def save(self, state: State) -> None:
        await self._state.save(_POLICY, state)

    async def close(self) -> None:
        if not self._closed:
            self._closed = True
            await self._elector.close()
            self._api.close()

    async def _begin_term(self) -> None:
        """Load what a former leader asked for, if this process has just begun to lead or has not looked yet."""
        term = self._elector.term
        if term == self._term:
            return
        saved = await self._state.load(_ASKED)
        saved_by_name, wall_s = saved if isinstance(saved, dict) else {}, self._wall()
        found = {name: ledger.entry_of(saved_by_name.get(name.value), wall_s) for name in PoolName}
        self._entries = {name: entry for name, entry in found.items() if entry is not None}
        self._saved, self._term = saved, term

    async def _look(self, name: PoolName) -> None:
        """Read one Deployment and decide whether its replicas are ours."""
        deployment = self._settings.deployments[name]
        try:
            seen = seen_of(await self._api.get(f"{self._deployments}/{deployment}"))
        except MissingError as error:
            remedy = f"make it, or name another one with --…-{name}-deployment"
            raise ApiError(f"{name}: Deployment {deployment}", f"does not exist; {remedy}", error.status) from None
        before = self._entries.get(name)
        self._seen[name], self._entries[name] = seen, ledger.looked(before, seen, self._wall())
        if before is not None:
            await self._tell_change(name, before)
        held = self._held(name)
        if held is not None and held.mistake:
            await self._events.tell(self._subject(name), "BadAnnotation", f"Nothing changes: {held.mistake}", kind="Warning")

    async def _look_again(self, name: PoolName) -> None:
        """Read again after a conflict. Raises PlatformError if a person has changed the Deployment."""
        before = self._seen[name]
        await self._look(name)
        if self._seen[name].replicas != before.replicas or self._held(name) is not None:
            await self._save_entries()
            raise PlatformError(f"{name}: someone has changed the Deployment {before.name} just now; nothing was overwritten")

    async def _set(self, name: PoolName, replicas: int) -> bool:
        """Set the replicas; returns False if the Deployment has changed since it was read. Raises PlatformError."""
        seen, held = self._seen[name], self._held(name)
        if held is not None:
            raise PlatformError(f"{name}: the Deployment {seen.name} is not scaled: held by {held.by}")
        self._entries[name] = self._entries[name].asking(replicas, self._wall())
        await self._save_entries()
        self._check_lead()
        body = {"metadata": {"resourceVersion": seen.version}, "spec": {"replicas": replicas}}
        try:
            scale = await self._api.patch(f"{self._deployments}/{seen.name}/scale", body)
        except ConflictError:
            return False
        self._seen[name] = replace(seen, replicas=replicas, version=str(scale["metadata"]["resourceVersion"]))
        return True

    async def _save_entries(self) -> None:
        entries = {name.value: entry.save() for name, entry in self._entries.items()}
        if entries != self._saved:
            await self._state.save(_ASKED, entries)
            self._saved = entries

    def _check_lead(self) -> None:
        if not self._elector.leads:
            raise PlatformError("this process no longer leads and leaves the Deployments to the leader")

    def _held(self, name: PoolName) -> Held | None:
        return ledger.hold(self._entries[name], self._seen[name], self._wall(), self._settings.manual_hold_s)

    def _asked(self, name: PoolName, now_s: float) -> Asked:
        held = self._held(name)
        return Asked(self._seen[name].replicas, Hold(held.by, now_s + held.left_s) if held is not None else None)

    def _subject(self, name: PoolName) -> Subject:
        return Subject("apps/v1", "Deployment", self._seen[name].name, self._seen[name].uid)

    async def _tell(self, name: PoolName, before: int, replicas: int, reason: str) -> None:
        logger.info("%s: %d -> %d replicas: %s", name, before, replicas, reason)
        what = "ScaledUp" if replicas > before else "ScaledDown"
        await self._events.tell(self._subject(name), what, f"{before} → {replicas} replicas: {reason}")

    async def _tell_change(self, name: PoolName, before: Entry) -> None:
        """Report that a person has changed the replicas or ended a hold."""
        seen, entry, held_s = self._seen[name], self._entries[name], self._settings.manual_hold_s
        if entry.changed_s not in (None, before.changed_s):
            reason, action = "ManualChange", "Hold"
            note = f"{seen.replicas} replicas were set by {entry.changed_by}; they stay for {held_s:g} s"
        elif ledger.has_ended(before, entry, self._wall(), held_s):
            reason, action = "HoldEnded", "Scale"
            note = f"the {seen.replicas} replicas that were set by {before.changed_by} stay no longer: an annotation was changed"
        else:
            return
        logger.info("%s: %s", name, note)
        if self._elector.leads and held_s > 0:
            await self._events.tell(self._subject(name), reason, note, action=action)
