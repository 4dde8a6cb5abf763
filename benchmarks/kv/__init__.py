"""Benchmarks of KV that is fetched from other workers and restored from tiers: `python -m benchmarks.kv` on a real mesh,
`python -m benchmarks.kv.mooncake` on Mooncake's trace."""
