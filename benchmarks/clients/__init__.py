"""Third parties' clients and gateways, as their users run them, against a real mesh: `make bench-clients`.

A client is one line in `catalogue.py` and a child module, which runs in the client's own environment (benchmarks/peers), so it
imports nothing but that client. Its protocol: see `cases.py`.
"""
