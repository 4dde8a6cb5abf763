"""`make manifests`: writes what k8s/base and k8s/components hold, from the chart, so that there is one source of both.

The chart is rendered with the values of k8s/chart/examples/base.yaml, and each template becomes a file. What differs for a
cluster are the patches of k8s/overlays, as it is values for the chart; a test compares the two object by object.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
CHART = ROOT / "k8s" / "chart"
HEADER = "# Made of k8s/chart by `make manifests`: change it there.\n"
# Template by file.
FILES = {
    "base/priorities.yaml": "priorities",
    "base/network.yaml": "network",
    "base/redis.yaml": "redis",
    "base/objectives.yaml": "objectives",
    "base/tenants.yaml": "tenants",
    "base/router.yaml": "router",
    "base/worker-services.yaml": "worker-services",
    "base/workers/prefill/prefill.yaml": "prefill",
    "base/workers/decode/decode.yaml": "decode",
    "components/autoscaler/autoscaler.yaml": "autoscaler",
    "components/autoscaler/rbac.yaml": "autoscaler-rbac",
    "components/autoscaler/network.yaml": "network-autoscaler",
    "components/prefill/service.yaml": "prefill-service",
    "components/telemetry/collector.yaml": "collector",
    "components/telemetry/scrape.yaml": "scrape",
    "components/telemetry/network.yaml": "network-telemetry",
    "components/service-monitor/service-monitor.yaml": "service-monitor",
    "components/gateway/gateway.yaml": "gateway",
    "components/gateway/network.yaml": "network-gateway",
    "components/tracing/jaeger.yaml": "jaeger",
    "components/tracing/network.yaml": "network-tracing",
    "components/tracing/grafana.yaml": "grafana",
}
_VALUES = ("tracing.enabled=true", "telemetry.serviceMonitor=true")
# Rendered apart, since it changes the workers, which an overlay patches.
_GATEWAY = ("gateway", "network-gateway")
# Set by overlays, for processes that they tell to send there.
_LEFT_OUT = re.compile(r"^ +- name: PDMESH_OTLP_ENDPOINT\n.*\n", re.MULTILINE)
# Images have their tags in kustomizations, where people change them.
_TAG = re.compile(r"^( +image: [^\s:]+(?:/[^\s:]+)*):\S+$", re.MULTILINE)


def rendered(helm: str, *more: str) -> dict[str, str]:
    """The documents that each template makes, with `more` values. Raises CalledProcessError with what helm says."""
    values = [part for value in (*_VALUES, *more) for part in ("--set", value)]
    command = [helm, "template", "pdmesh", str(CHART), "-n", "pdmesh", "--kube-version", "1.34.0", *values]
    printed = subprocess.run(
        [*command, "-f", str(CHART / "examples/base.yaml")], check=True, stdout=subprocess.PIPE, text=True, timeout=60
    ).stdout
    found: dict[str, list[str]] = {}
    for document in re.split(r"^---\n", printed, flags=re.MULTILINE):
        if match := re.match(r"# Source: pdmesh/templates/([\w-]+)\.yaml\n", document):
            found.setdefault(match[1], []).append(document[match.end() :].strip() + "\n")
    return {template: _joined(documents) for template, documents in found.items()}


def _joined(documents: list[str]) -> str:
    """One text; what is a comment alone comes first."""
    alone = [document for document in documents if all(line.startswith("#") for line in document.splitlines())]
    return "".join(alone) + "---\n".join(document for document in documents if document not in alone)


def contents(helm: str) -> dict[Path, str]:
    """What each file is to hold."""
    with_gateway = rendered(helm, "gateway.enabled=true", "autoscaler.scaling=watch")
    documents = rendered(helm) | {template: with_gateway[template] for template in _GATEWAY}
    return {ROOT / "k8s" / name: HEADER + _cleaned(documents[template]) for name, template in FILES.items()}


def _cleaned(text: str) -> str:
    text = _TAG.sub(r"\1", _LEFT_OUT.sub("", text))
    # Where a template had nothing to add; an empty line of a file in a ConfigMap is its own.
    return text if "kind: ConfigMap" in text else re.sub(r"^ +$\n", "", text, flags=re.MULTILINE)


def main() -> None:
    helm = shutil.which("helm", path=str(Path(sys.executable).parent)) or shutil.which("helm")
    if helm is None:
        sys.exit("helm is not installed: make .venv/bin/helm, or https://helm.sh")
    for path, text in contents(helm).items():
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
