"""What the policy expects for a request, as admission asks for it: the mesh's answer to "would it meet its objective?"."""

from dataclasses import dataclass
from typing import Protocol

from router.tokenization.prepared_request import Job


@dataclass(frozen=True)
class Forecast:
    """`ttft_s` from the moment at which it is placed, `tpot_s` of its own tokens: of the best placement there is.

    `has_room`: some worker could hold it now. `ahead_s`: the part of `ttft_s` that other requests' prompts take.
    `idle_tpot_s`: what the fastest worker would give it with nothing else to do; None: it was not looked at, or is not known."""

    ttft_s: float
    tpot_s: float
    has_room: bool
    ahead_s: float = 0.0
    idle_tpot_s: float | None = None


class Forecaster(Protocol):
    """Looks at the fleet as it is now."""

    def forecast(self, job: Job) -> Forecast | None:
        """None while nothing is known: no worker, or none that says how fast it is."""
