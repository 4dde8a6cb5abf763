"""`make bench-handoff`: what moving KV costs between two processes."""
