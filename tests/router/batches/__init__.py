"""Tests of batch files."""
