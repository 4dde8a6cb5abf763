"""KV over NIXL (RDMA, NVLink): the receiver reads the sender's pool. Optional."""
