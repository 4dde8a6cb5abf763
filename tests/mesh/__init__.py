"""Tests with real processes, real sockets, a real Redis."""
