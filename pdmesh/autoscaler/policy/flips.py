"""Idle workers take the other role before pods are asked for, and give it back. Pure."""

from dataclasses import replace

from pdmesh.autoscaler.decision import Flip
from pdmesh.autoscaler.policy.memory import PoolMemory
from pdmesh.autoscaler.policy.pool_plan import Plan
from pdmesh.autoscaler.settings import AutoscalerSettings
from pdmesh.autoscaler.views import PoolName

SPARE_SHARE = 0.5
"""Of a cool-down, for which a pool has to have had workers to spare before it lends them."""


def flip(
    plans: dict[PoolName, Plan], memories: dict[PoolName, PoolMemory], settings: AutoscalerSettings, now_s: float
) -> tuple[dict[PoolName, Plan], tuple[Flip, ...]]:
    """The plans with the workers that change sides. Only one direction at a time: the other pool has none to give."""
    for taker, giver in ((PoolName.PREFILL, PoolName.DECODE), (PoolName.DECODE, PoolName.PREFILL)):
        if not settings.flips or giver not in plans or settings.of(taker).gpus_per_replica != settings.of(giver).gpus_per_replica:
            break
        taking, giving = plans[taker], plans[giver]
        if taking.view.hold is not None or giving.view.hold is not None:
            break
        num = min(taking.num_added, _spare(giving, memories[giver], settings, now_s))
        if num > 0:
            return plans | {taker: _taken(taking, num), giver: _given(giving, taker, num)}, (Flip(giver, taker, num),)
        returned = min(-giving.num_added, giving.view.num_borrowed, settings.of(taker).max_replicas - taking.target)
        if returned > 0 and taking.num_added >= 0:
            return plans | {taker: _returned(taking, giver, returned)}, (Flip(giver, taker, returned),)
    return plans, ()


def _spare(giving: Plan, memory: PoolMemory, settings: AutoscalerSettings, now_s: float) -> int:
    """Workers that the pool can do without, with headroom, and that serve already. It need not have been for as long as before
    it shrinks: they can be had back as fast."""
    if memory.grew_within(now_s, settings.cool_down_s) is not None:
        return 0
    most = memory.most_enough(now_s, SPARE_SHARE * settings.cool_down_s)
    enough = giving.size.enough if most is None else max(most, giving.size.enough)
    return giving.view.num_ready - max(enough, settings.of(giving.view.name).min_replicas)


def _taken(taking: Plan, num: int) -> Plan:
    rest = taking.num_added - num
    pods = f", so {rest} pods instead of {taking.num_added} are asked for" if rest else ", so no pod is asked for"
    return replace(taking, reason=f"{taking.reason}; {num} idle take this role at once{pods}")


def _given(giving: Plan, taker: PoolName, num: int) -> Plan:
    target = min(giving.target, giving.view.num_replicas - num)
    return replace(giving, target=target, reason=f"{giving.size.enough} would do; {num} idle become {taker}")


def _returned(taking: Plan, giver: PoolName, num: int) -> Plan:
    return replace(taking, target=taking.target + num, reason=f"{taking.reason}; {num} come back from {giver}")
