"""The router validates, tokenizes, admits, places and follows requests, and streams their tokens to clients."""
