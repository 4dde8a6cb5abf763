"""Generates rules for Prometheus and dashboards for Grafana.

`python -m pdmesh.monitoring` writes them into k8s/components/telemetry/; with --check it only compares.
"""
