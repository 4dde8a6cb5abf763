"""Smaller scenarios with the same violation."""
