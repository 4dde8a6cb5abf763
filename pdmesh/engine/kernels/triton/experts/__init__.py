"""A mixture of experts on the device: which experts a token takes, and the products of each expert's tokens."""
