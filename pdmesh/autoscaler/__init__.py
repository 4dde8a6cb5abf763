"""Decides how many workers each pool needs to keep the objectives, and scales Kubernetes Deployments or local processes."""
