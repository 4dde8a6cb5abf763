"""The decode service reserves KV blocks for requests, receives or computes their KV, and streams their tokens.

Life of a request here: Submit reserves blocks (`requests`), a prefill worker pushes KV into them (`transfer_delegate`) or the
engine computes the prompt itself, the engine's updates are kept per request (`request`), and one frame per engine step carries
them to the request's router (`token_stream`). `LeaseKeeper` in `service` ends what ran out of time: leases, deadlines, routers
that went silent.
"""
