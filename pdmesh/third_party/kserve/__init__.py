"""Stubs of the Open Inference Protocol v2 (package `inference`)."""
