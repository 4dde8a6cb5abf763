"""Two processes: a push that succeeds, and one whose sender is killed at each failpoint."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from tests.kvtransfer.conftest import CONVERTING
from tests.support.certificates import mesh_secret, mesh_tls
from tests.support.nixl import NEEDS_NIXL, NIXL_DEVICE

DEADLINE_S = 30
NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
ON_GPU = pytest.param("cuda_ipc+gpu", marks=[pytest.mark.gpu, NEEDS_GPU])
NIXL_ON_GPU = pytest.param("nixl+gpu", marks=[pytest.mark.gpu, NEEDS_GPU, NEEDS_NIXL])


@contextmanager
def process(*arguments: str, failpoints: str = "") -> Iterator["subprocess.Popen[str]"]:
    mesh_tls(), mesh_secret()  # once, for both of them
    command = [sys.executable, "-m", "tests.kvtransfer.transfer_process", *arguments]
    environment = {**os.environ, "PDMESH_FAILPOINTS": failpoints}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment) as child:
        try:
            yield child
        finally:
            child.kill()


def end(receiver: "subprocess.Popen[str]") -> None:
    """Nobody needs it any more: it stops, as it should."""
    assert receiver.stdin is not None
    receiver.stdin.close()
    assert receiver.wait(DEADLINE_S) == 0


def said(child: "subprocess.Popen[str]") -> dict[str, Any]:
    assert child.stdout is not None
    line = child.stdout.readline()
    assert line, f"the process ended with {child.wait(DEADLINE_S)}"
    answer: dict[str, Any] = json.loads(line)
    return answer


@pytest.fixture(params=["cuda_ipc", ON_GPU, NIXL_DEVICE, NIXL_ON_GPU, *CONVERTING])
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.timeout(120)
def test_bytes_cross_between_processes(transport: str) -> None:
    with process("receive", transport) as receiver:
        opening = said(receiver)
        with process("send", transport, opening["reservation"]) as sender:
            assert said(sender) == {"outcome": transport.partition("+")[0], "num_bytes": 200 * 12 * 2 * 512}
            assert sender.wait(DEADLINE_S) == 0
        assert said(receiver) == {"sum": opening["expected"], "events": ["open", "commit"]}
        end(receiver)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("failpoint", ["push.part=kill@7", "push.before_commit=kill"])
def test_a_killed_sender_fails_the_attempt(transport: str, failpoint: str) -> None:
    with process("receive", transport) as receiver:
        opening = said(receiver)
        with process("send", transport, opening["reservation"], failpoints=failpoint) as sender:
            assert sender.wait(DEADLINE_S) == -9
        assert said(receiver)["events"] == ["open", "failed"]
        end(receiver)
