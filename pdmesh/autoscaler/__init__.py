"""How many workers each pool needs to keep the objectives: decides (pure), and acts on Kubernetes or on local processes."""
