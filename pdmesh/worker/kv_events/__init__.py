"""KV events for readers outside the mesh: what the prefix cache holds, with token ids, over gRPC and over ZMQ."""
