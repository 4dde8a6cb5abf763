"""What /metrics say, in vLLM's text and in that of a router of ours."""

import pytest

from pdmesh.planning.latency_model import LatencyModel
from router.endpoint_picker.server_metrics import ServerLoad, ServerSpeed, read_metrics

VLLM = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 2.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="m"} 1.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.5
vllm:cache_config_info{block_size="32",cache_dtype="auto",engine="0",num_gpu_blocks="1000",sliding_window="None"} 1.0
vllm:prompt_tokens_total{engine="0",model_name="m"} 4000.0
vllm:prefix_cache_hits_total{engine="0",model_name="m"} 1000.0
vllm:request_prefill_time_seconds_count{engine="0",model_name="m"} 4.0
vllm:request_prefill_time_seconds_sum{engine="0",model_name="m"} 0.6
vllm:inter_token_latency_seconds_count{engine="0",model_name="m"} 100.0
vllm:inter_token_latency_seconds_sum{engine="0",model_name="m"} 2.0
"""


def test_vllm_with_two_engines() -> None:
    load = read_metrics(VLLM)
    assert load == ServerLoad(5, 1, 0.5, 32, 1000, 0.6, 4.0, 4000.0, 1000.0, 2.0, 100.0)


def test_names_of_before_are_read() -> None:
    load = read_metrics("vllm:gpu_cache_usage_perc 0.5\nvllm:time_per_output_token_seconds_sum 3\n")
    assert load is not None
    assert (load.used, load.gap_s) == (0.5, 3.0)


@pytest.mark.parametrize("text", ["", "up 1\n", "<html>", "vllm:num_requests_running{} NaN\n", "vllm:num_requests_running x\n"])
def test_another_server_says_nothing(text: str) -> None:
    assert read_metrics(text) is None


@pytest.mark.parametrize("value", ["-1", "1e300", "+Inf", "NaN", "9" * 400])
def test_numbers_that_cannot_be_are_left_out(value: str) -> None:
    load = read_metrics(f"vllm:num_requests_running 2\nvllm:num_requests_waiting {value}\n")
    assert load is not None
    assert (load.num_running, load.num_waiting) == (2, 0)


def test_speed_is_learned_from_differences() -> None:
    speed = ServerSpeed()
    for step in range(40):
        each = ServerLoad(8, 0, 0.1, 16, 1000, 0.2 * step, 2.0 * step, 2000.0 * step, 0.0, 1.0 * step, 50.0 * step)
        speed.observe(each, float(step))
    assert speed.model is not None
    assert speed.model.prefill_s(0, 1000, chunk=2000) == pytest.approx(0.1, rel=0.3)
    assert speed.model.decode_s(8, 1600) == pytest.approx(0.02, rel=0.3)


def test_a_server_that_starts_anew_teaches_nothing() -> None:
    speed = ServerSpeed()
    speed.observe(ServerLoad(num_prompts=10.0, prefill_s=5.0, prompt_tokens=1e4), 0.0)
    speed.observe(ServerLoad(num_prompts=1.0, prefill_s=0.1, prompt_tokens=1e3), 1.0)
    assert speed.model is None


def test_a_server_that_says_its_speed_is_believed() -> None:
    parts = {"fixed": 0.004, "prefill_token": 2e-4, "prefill_context": 1e-8, "sequence": 3e-4, "context_token": 1e-7}
    text = "".join(f'pdmesh:step_seconds{{model_name="m",part="{part}"}} {value}\n' for part, value in parts.items())
    load = read_metrics("vllm:num_requests_running 0\n" + text)
    assert load is not None
    speed = ServerSpeed()
    speed.observe(load, 0.0)
    assert speed.model == LatencyModel(0.004, 2e-4, 1e-8, 3e-4, 1e-7)


def test_a_speed_that_no_prediction_can_use_is_none() -> None:
    text = "".join(
        f'pdmesh:step_seconds{{part="{part}"}} 1e9\n'
        for part in ("fixed", "prefill_token", "prefill_context", "sequence", "context_token")
    )
    load = read_metrics("vllm:num_requests_running 0\n" + text)
    assert load is not None
    assert load.speed is None
