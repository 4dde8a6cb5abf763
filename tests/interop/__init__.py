"""Third parties' clients, gateways and load generators, as their users run them, against a real mesh: `make bench-clients`.

A client is one line in `catalogue.py` and a child module, which runs in the client's own environment (benchmarks/peers), so it
imports nothing but that client (its protocol: `cases.py`); `asking.py` drives it. A load generator is a module in `load/` that
knows its command and its report; `loading.py` drives it. Both are compared with the mesh's `records.py`.
"""
