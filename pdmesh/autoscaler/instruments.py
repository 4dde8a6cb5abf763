"""What an autoscaler counts and measures: the catalogue."""

from pdmesh.runtime.telemetry.metrics import counter, gauge

WANTED = gauge("pdmesh.autoscaler.wanted", "Replicas that a pool is to have by the latest decision", ("pool",))
REPLICAS = gauge("pdmesh.autoscaler.replicas", "Replicas that it had then: those that serve and those that start", ("pool",))
READY = gauge("pdmesh.autoscaler.ready", "Workers that serve in the pool's roles", ("pool",))
HELD = gauge("pdmesh.autoscaler.held", "1: the latest decision keeps everything as it is", ("reason",))
DECISIONS = counter(
    "pdmesh.autoscaler.decisions",
    "Decisions for a pool: up, down, stay, and what held it if anything did",
    ("pool", "change", "held"),
)
EVENTS = counter("pdmesh.autoscaler.events", "What was done: scale, flip, hold, resume, failed", ("kind",))
FLIPPED = counter("pdmesh.autoscaler.flips", "Workers that were to take another role", ("giver", "taker"))
FAILED_STARTS = gauge("pdmesh.autoscaler.failed_starts", "Starts that have been awaited for too long", ("pool",))
FORECAST = gauge("pdmesh.autoscaler.forecast", "Requests a second that are expected: mean and spread", ("what",))
DECISION_AGE = gauge("pdmesh.autoscaler.decision.age", "Since the latest decision", unit="s")
ROUND_AGE = gauge("pdmesh.autoscaler.round.age", "Since the latest round that came to its end", unit="s")
LEADER = gauge("pdmesh.autoscaler.leader", "1: this one decides")

ALL = (
    WANTED, REPLICAS, READY, HELD, DECISIONS, EVENTS, FLIPPED, FAILED_STARTS, FORECAST, DECISION_AGE, ROUND_AGE, LEADER,
)  # fmt: skip
