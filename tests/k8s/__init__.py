"""The manifests and the Dockerfile: consistent in themselves, and with the programs that they start."""
