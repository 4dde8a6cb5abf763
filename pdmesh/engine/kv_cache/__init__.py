"""The paged KV cache: block pool, block manager, prefix cache events, copies, memory shared with other processes."""
