"""Where tiers keep blocks: host memory, a folder, a Redis; the form of a block there, and which go first when room is lacking."""
