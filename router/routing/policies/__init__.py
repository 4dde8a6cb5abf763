"""Routing policies by a single signal, to compare with; the default policy is `cost_policy`."""
