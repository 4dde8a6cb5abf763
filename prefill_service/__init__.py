"""The prefill service computes a prompt's KV for a reservation on a decode worker, or fetches a part of it, and pushes it there.

Life of a call: `service` checks it, `handoff` has the engine compute it, streams the first token back, pushes the blocks and
reports the outcome. The blocks are released exactly once, however the call ends.
"""
