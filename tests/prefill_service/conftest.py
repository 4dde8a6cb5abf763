"""The workers of these tests."""

from tests.support.worker_fixtures import decoder, model, no_failpoints_left, prefiller, router

__all__ = ["decoder", "model", "no_failpoints_left", "prefiller", "router"]
