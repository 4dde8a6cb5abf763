"""Clients of each protocol that a router serves, behind one interface: `base.Side`."""
