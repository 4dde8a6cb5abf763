"""Every Triton kernel against its reference, on the device at hand: what `benchmarks/gpu` runs before it measures."""
