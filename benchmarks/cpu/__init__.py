"""`make bench-cpu`: the engine on the CPU beside other engines, accuracy, limits."""
