"""Tiers beneath the block pool, where KV stays that the pool has lost: host memory, disk, a store that hosts share."""
