"""The ways in which a part's bytes get from a sender's pool into a receiver's: one module each, listed in `registry`."""
