"""Clients in other languages against one real mesh: `make test-clients`."""
