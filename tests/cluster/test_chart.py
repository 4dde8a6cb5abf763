"""A platform team's way, with helm: install, an answer, load, a new revision, back again, scaling, a node that goes, the end."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import TracebackType
from typing import Self

import pytest

from pdmesh.client.client import Client
from pdmesh.errors import MeshError
from tests.cluster.autoscaling import DECODE, PREFILL, SWITCH
from tests.cluster.chart import Chart
from tests.cluster.cluster import NAMESPACE, ROUTER, Cluster
from tests.cluster.conftest import MESH
from tests.cluster.load import BURST, Load
from tests.k8s.tools import HELM

pytestmark = pytest.mark.skipif(HELM is None, reason="helm is not installed: make .venv/bin/helm, or https://helm.sh")
PROMPTS = ("The capital of France is", "Once upon a time there was", "Water is made of")


class Same:
    """Asks the same again and again while something is done to the mesh: the answers have to be equal, token for token."""

    def __init__(self, api_key: str) -> None:
        self._api_key = api_key
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="same")
        self.answers: dict[str, set[tuple[int, ...]]] = {prompt: set() for prompt in PROMPTS}
        self.errors: list[str] = []
        self.num_answers = 0

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        with Client(ROUTER, api_key=self._api_key, resume_timeout_s=30) as client:
            while not self._stopping.wait(0.1):
                for prompt in PROMPTS:
                    try:
                        answer = client.generate(prompt, max_tokens=32, temperature=0.7, seed=5, ignore_eos=True, timeout=90)
                    except MeshError as error:
                        self.errors.append(f"{type(error).__name__}: {error}")
                    else:
                        self.answers[prompt].add(tuple(answer.token_ids))
                        self.num_answers += 1

    def assert_same(self) -> None:
        """All of them, and there were some of each."""
        assert not self.errors, self.errors[:3]
        assert {prompt: len(found) for prompt, found in self.answers.items()} == dict.fromkeys(PROMPTS, 1)


@pytest.fixture(scope="module")
def chart(cluster: Cluster) -> Iterator[Chart]:
    """Installed, and at the end nothing of it is left for the tests of the kustomizations."""
    chart = Chart(cluster)
    chart.install()
    yield chart
    if chart.left():
        chart.helm("uninstall", "pdmesh", "--wait", "--ignore-not-found")
    cluster.plane.kubectl("-n", NAMESPACE, "delete", "secret", "-l", "pdmesh-made-by=chart")


@pytest.fixture(scope="module")
def key(chart: Chart) -> str:
    return chart.client_key()


def test_it_is_installed_and_answers(chart: Chart, key: str) -> None:
    assert chart.revision() == (1, "deployed")
    cluster = chart.cluster
    for name in MESH:
        assert cluster.ready_pods(name), name
    with Client(ROUTER, api_key=key) as client:
        answer = client.chat(
            [("user", "What is the capital of France?")], temperature=0, max_tokens=24, mode="remote", timeout=60
        )
    assert "Paris" in answer.text
    assert answer.timings.transport == "tcp"
    with Client(ROUTER) as client, pytest.raises(MeshError, match="key"):
        client.chat([("user", "Hello")], max_tokens=1, timeout=20)


def test_helm_test_passes(chart: Chart) -> None:
    assert "Succeeded" in chart.helm("test", "pdmesh", "--timeout=120s")


def test_a_new_revision_and_the_way_back_lose_no_request_and_change_no_token(chart: Chart, key: str) -> None:
    cluster, secrets = chart.cluster, chart.secrets()
    before = {name: cluster.ready_pods(name) for name in (DECODE, PREFILL)}
    with Load(key, resume_s=30) as load, Same(key) as same:
        load.wait_for_answers(4)
        chart.upgrade({"decode.env.PDMESH_MAX_NUM_SEQS": "6", "prefill.env.PDMESH_KV_MEMORY_MB": "500"})
        assert chart.revision() == (2, "deployed")
        load.wait_for_answers(4)
        between = {name: cluster.ready_pods(name) for name in (DECODE, PREFILL)}
        chart.rollback()
        assert chart.revision() == (3, "deployed")
        load.wait_for_answers(4)
    load.assert_none_failed(at_least=12)
    same.assert_same()
    for name, pods in between.items():
        assert not set(pods) & set(before[name]), f"{name} was not rolled out"
    assert {outcome.decode_worker for outcome in load.outcomes} & set(between[DECODE])
    assert chart.secrets() == secrets


def test_the_autoscaler_goes_up_and_down(chart: Chart, key: str) -> None:
    cluster = chart.cluster
    with Load(key, clients=BURST, patient=False) as burst:
        cluster.wait_for(lambda: cluster.replicas(DECODE) > 1, "more replicas", timeout_s=120)
        cluster.wait_for(lambda: len(cluster.ready_pods(DECODE)) > 1, "a new pod to be ready", timeout_s=120)
    burst.assert_none_failed()
    cluster.wait_for(lambda: cluster.replicas(DECODE) == 1, "fewer replicas", timeout_s=150)


def test_a_node_is_drained_without_a_failed_request(chart: Chart, key: str) -> None:
    cluster, kubectl = chart.cluster, chart.cluster.plane.kubectl
    kubectl("-n", NAMESPACE, "annotate", "deployment", DECODE, PREFILL, f"{SWITCH}=off")
    cluster.scale(DECODE, 2)
    cluster.wait_rolled_out(DECODE)
    (pod, *_) = [pod for pod in cluster.pods(DECODE) if "deletionTimestamp" not in pod["metadata"]]
    node = pod["spec"]["nodeName"]
    with Load(key, resume_s=30) as load, Same(key) as same:
        load.wait_for_answers(4)
        kubectl("drain", node, "--ignore-daemonsets", "--delete-emptydir-data", "--timeout=180s", timeout_s=200)
        load.wait_for_answers(4)
        for name in MESH:
            cluster.wait_rolled_out(name)
        kubectl("uncordon", node)
        load.wait_for_answers(2)
    load.assert_none_failed(at_least=10)
    same.assert_same()
    assert pod["metadata"]["name"] not in cluster.ready_pods(DECODE)


def test_uninstall_leaves_nothing_but_the_secrets(chart: Chart) -> None:
    secrets = chart.secrets()
    chart.uninstall()
    chart.cluster.wait_for(lambda: not chart.left(), "everything to go", timeout_s=120)
    assert chart.secrets() == secrets, "keys and the mesh's secret outlive a release; docs/kubernetes.md says how to delete them"
