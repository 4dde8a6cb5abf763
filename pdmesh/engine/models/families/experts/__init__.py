"""Families with a mixture of experts."""
