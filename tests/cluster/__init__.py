"""The manifests on a real Kubernetes control plane, their pods as local processes (README.md)."""
