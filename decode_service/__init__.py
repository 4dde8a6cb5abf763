"""The decode service owns requests: it reserves their blocks, receives or computes their KV and streams their tokens.

Life of a request here: Submit reserves blocks (`reservations`), a prefill worker pushes into them (`delegate`) or the engine
computes the prompt itself, the engine's updates are kept per request (`outputs`), and one frame per engine step carries them to
the request's router (`outbox`). `lease_keeper` ends what ran out of time: leases, deadlines, routers that went silent.
"""
