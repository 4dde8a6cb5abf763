"""A mesh on this machine: processes started, supervised, scaled and stopped together."""
