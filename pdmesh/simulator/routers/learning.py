"""What a request that has ended teaches its router: as `router/learning.py`."""

from pdmesh.simulator.request import Stay
from pdmesh.simulator.routers.ledger import MODEL
from pdmesh.simulator.routers.routing import Outlook
from router.routing.cost_model import Overhead


def learn(outlook: Outlook, stay: Stay) -> None:
    """A request that was tried again or lost teaches nothing about a smooth one."""
    request, placement = stay.request, stay.placement
    outlook.output_lengths.observe(MODEL, request.arrival.tenant, request.num_output)
    if request.num_resubmissions or stay.tried or request.first_at is None:
        return
    chosen, tpot_s = placement.chosen, request.tpot_s
    if tpot_s and chosen is not None and chosen.prediction is not None:
        outlook.overheads.observe_tpot(placement.decode, chosen.prediction.steps_tpot_s, tpot_s)
    on_worker_s = stay.computed_at - stay.entered_at
    before_s = max(0.0, request.first_at - stay.decided_at - on_worker_s)
    outlook.overheads.observe(placement.prefill, placement.decode, Overhead(before_s, stay.after_s))
