"""Agents' libraries on the gateway: a small program for each (its protocol: `checks.py`), which runs in the library's own
environment and imports nothing but that library. `catalogue.py` lists them, `running.py` drives them."""
