"""Picking: admission by priority and tenant, then the router's policy over the pool's endpoints.

A request holds a place from `pick` to `Pick.end`, and counts at its endpoint as long.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from pdmesh.runtime.errors import Unavailable
from router.endpoint_picker.config import PickerConfig
from router.endpoint_picker.endpoints import POOL_MODEL, Endpoints, SentRequest
from router.endpoint_picker.prompts import Prompt
from router.flow_control.capacity import AdmissionSettings
from router.flow_control.controller import Admission, FlowController
from router.flow_control.slo_admission import STANDARD, FlowItem, Forecast, Ticket
from router.routing.filters import NoPlacement, Placement, RoutingRequest, free_elsewhere
from router.routing.learned import Overheads
from router.routing.policy import make_policy
from router.routing.worker_snapshot import Mode, WorkerKey

CachedTokens = Mapping[WorkerKey, int]
NO_ENDPOINT_DELAY_S = 1.0
FRESH_S = 0.001
"""A placement is as good so long: forecast and choice of a request that need not wait are one."""


@dataclass(frozen=True)
class Asked:
    """Hold what one HTTP request asks for. `subset`: the addresses that the gateway allows, None: all of the pool; `num_bytes`:
    what it holds while it waits; objectives in seconds, None: it has none."""

    prompt: Prompt
    subset: frozenset[str] | None = None
    tenant: str = ""
    priority: int = STANDARD
    ttft_s: float | None = None
    tpot_s: float | None = None
    num_bytes: int = 0


class Pick:
    """Hold one request's place. `addresses`: the endpoint to use first, then those to fall back to."""

    def __init__(self, picker: Picker, ticket: Ticket, addresses: tuple[str, ...], cached_tokens: int) -> None:
        self.addresses, self.cached_tokens = addresses, cached_tokens
        self._picker, self._ticket = picker, ticket
        self._sent: SentRequest | None = None
        self._prompt: Prompt | None = None
        self._is_answered = False

    def send(self, prompt: Prompt) -> None:
        """Count the request at its first endpoint."""
        self._prompt = prompt
        self._sent = self._picker.endpoints.sent(self.addresses[0], prompt, self.cached_tokens, time.monotonic())
        self._picker.flow.placed(self._ticket)

    def answered(self, served: str = "") -> None:
        """Note that the response has begun; `served`: the address that it came from, where the gateway says so."""
        endpoints, before = self._picker.endpoints, self._sent
        if self._is_answered or before is None or self._prompt is None:
            return
        self._is_answered = True
        if served and served != before.key[0]:
            endpoints.ended(before)
            self._sent = endpoints.sent(served, self._prompt, 0, time.monotonic())
        if self._sent is not None:
            endpoints.answered(self._sent)
        self._picker.flow.admission.answered(self._ticket, asyncio.get_running_loop().time())

    def end(self) -> None:
        """Give the place back. Idempotent."""
        sent, self._sent = self._sent, None
        if sent is not None:
            self._picker.endpoints.ended(sent)
        self._picker.flow.leave(self._ticket)


class Picker:
    """Pick endpoints of one pool."""

    def __init__(self, config: PickerConfig, endpoints: Endpoints) -> None:
        self.endpoints = endpoints
        self._policy = make_policy(config.policy, Overheads(), 0)
        self._num_fallbacks = config.num_fallbacks
        settings = AdmissionSettings(
            max_inflight=config.max_inflight,
            max_queued=config.max_queued,
            max_queued_bytes=config.max_queued_bytes,
            hold_timeout_s=config.hold_timeout_s,
        )
        self.flow = FlowController(Admission(settings))

    async def pick(self, asked: Asked) -> Pick:
        """Return a place, to be given back with `end`. Raises Unavailable without an endpoint that is ready, ResourceExhausted
        with a retry delay where the request is refused or has to make way for others."""
        placing = _Placing(self._place, asked)
        placing.fresh()  # refused at once where there is no endpoint: it would wait for nothing
        ticket = await self.flow.enter(_flow_item(asked, placing.forecast))
        try:
            return self._placed(ticket, asked, *placing.fresh())
        except BaseException:
            self.flow.leave(ticket)
            raise

    def _placed(self, ticket: Ticket, asked: Asked, placement: Placement, cached_tokens: CachedTokens) -> Pick:
        first = placement.decode
        addresses = (first.address, *self._fallbacks(asked, placement, cached_tokens))
        self._policy.placed(first, None)
        pick = Pick(self, ticket, addresses, cached_tokens.get(first.key, 0))
        pick.send(asked.prompt)
        return pick

    def _place(self, asked: Asked) -> tuple[Placement, CachedTokens]:
        cached_tokens = self.endpoints.cached_tokens(asked.prompt)
        choice = self._choose(asked, cached_tokens)
        if isinstance(choice, NoPlacement):
            raise Unavailable(self._why_none(asked), retry_delay_s=NO_ENDPOINT_DELAY_S, reason="no_endpoint")
        return choice, cached_tokens

    def _choose(self, asked: Asked, cached_tokens: CachedTokens, without: Collection[WorkerKey] = ()) -> Placement | NoPlacement:
        excluded = frozenset(without)
        if asked.subset is not None:
            excluded |= self.endpoints.others(asked.subset)
        prompt = asked.prompt
        request = RoutingRequest(
            model=POOL_MODEL,
            num_tokens=prompt.num_tokens,
            num_choices=prompt.num_choices,
            max_total_tokens=prompt.num_tokens,
            cached_tokens=cached_tokens,
            mode=Mode.LOCAL,
            excluded_decode=excluded,
            expected_tokens=float(prompt.expected_tokens),
            ttft_goal_s=asked.ttft_s,
            tpot_goal_s=asked.tpot_s,
        )
        return self._policy.choose(self.endpoints.fleet, request, time.monotonic())

    def _fallbacks(self, asked: Asked, placement: Placement, cached_tokens: CachedTokens) -> list[str]:
        """Return the next best endpoints: those that the policy compared, else those that it would choose without the first."""
        first = placement.decode.key
        ranked = sorted(placement.candidates, key=lambda each: each.order)
        found = [each.decode.address for each in ranked if each.decode.key != first][: self._num_fallbacks]
        taken = {first} | {each.decode.key for each in ranked if each.decode.address in found}
        while len(found) < self._num_fallbacks:
            choice = self._choose(asked, cached_tokens, taken)
            if isinstance(choice, NoPlacement):
                break
            found.append(choice.decode.address)
            taken.add(choice.decode.key)
        return found

    def _why_none(self, asked: Asked) -> str:
        endpoints = self.endpoints
        if asked.subset is not None:
            ready = sum(endpoints.fleet.get(address) is not None for address in asked.subset)
            return f"{ready} of the {len(asked.subset)} endpoints that the gateway allows are ready and large enough"
        return f"{endpoints.num_ready} of the pool's {len(endpoints)} endpoints are ready, and none of these can take the request"


class _Placing:
    """Hold the placement of a request that asks for admission, anew where it is older than FRESH_S."""

    def __init__(self, place: Callable[[Asked], tuple[Placement, CachedTokens]], asked: Asked) -> None:
        self._place, self._asked = place, asked
        self._placement: tuple[Placement, CachedTokens] | None = None
        self._at = 0.0

    def fresh(self) -> tuple[Placement, CachedTokens]:
        """Return the placement, and what of the prompt each endpoint has. Raises what placing raises."""
        now = time.monotonic()
        if self._placement is None or now - self._at > FRESH_S:
            self._placement = None
            self._placement, self._at = self._place(self._asked), now
        return self._placement

    def forecast(self) -> Forecast | None:
        """Return the forecast for it; None while no endpoint can take it, or the speed of that one is not known."""
        try:
            placement, cached = self.fresh()
        except Unavailable:
            return None
        best = placement.chosen
        if best is None or best.prediction is None or best.decode.latency is None:
            return None
        predicted, elsewhere = best.prediction, free_elsewhere(placement, RoutingRequest("", 1, cached_tokens=cached))
        return Forecast(predicted.ttft_s, predicted.tpot_s, best.has_room, predicted.ahead_s, elsewhere=elsewhere)


def _flow_item(asked: Asked, foresee: Callable[[], Forecast | None]) -> FlowItem:
    return FlowItem(
        tenant=asked.tenant,
        priority=asked.priority,
        prompt_tokens=asked.prompt.num_tokens,
        output_tokens=asked.prompt.num_choices * asked.prompt.expected_tokens,
        num_bytes=asked.num_bytes,
        ttft_s=asked.ttft_s,
        tpot_s=asked.tpot_s,
        foresee=foresee,
    )
