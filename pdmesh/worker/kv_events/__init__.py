"""What the prefix cache holds, for others: with token ids for readers outside (gRPC, ZMQ), and by hash for the mesh's routers."""
