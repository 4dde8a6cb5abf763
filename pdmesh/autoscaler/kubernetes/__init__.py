"""Replicas from Kubernetes: scale subresources, one leader by a Lease, Events that say why, and metrics for HPA and KEDA."""
