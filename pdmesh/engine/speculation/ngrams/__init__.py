"""Drafts from tokens that were seen before: what followed the last few of them then."""
