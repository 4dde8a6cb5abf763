"""Other weights for a worker that runs, from a folder or from a stream."""
