"""The blocks of all workers with their token ids, for gateways that follow the mesh as one engine; only while one does."""
