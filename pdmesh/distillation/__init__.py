"""Distilled drafts: a small model of the same family learns a model's own outputs, to draft for it."""
