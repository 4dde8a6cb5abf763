"""Workers and routers in Redis: records, leases, the stream of prefix cache changes, an embedded Redis."""
