"""Which worker has which prompt blocks cached."""
