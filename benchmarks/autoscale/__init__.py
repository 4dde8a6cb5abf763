"""Autoscalers side by side: what others do (`rivals.py`), as they publish it."""
