"""Scales Deployments in Kubernetes: scale subresources, leader election by a Lease, Events with reasons, metrics for HPA and
KEDA.
"""
