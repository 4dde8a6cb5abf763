"""What one GPU gives: correctness first, then speed beside the machine's limits and beside peers; see `run.sh`."""
