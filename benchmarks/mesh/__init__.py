"""`make bench-mesh`: one engine alone, then behind router and workers: single requests, batches, workers that share a machine."""
