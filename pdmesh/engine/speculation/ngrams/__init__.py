"""Drafts from tokens that were seen before: those that followed the last few tokens then."""
