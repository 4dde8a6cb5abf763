"""Product code that a simulated run loads uses no clock, thread, socket or randomness that the simulation cannot replace.

What is allowed is listed with a reason. A new use either goes through what is replaced (`time.monotonic()`, `asyncio.sleep`,
`asyncio.to_thread`, `random.random()`, grpc.aio), or gets a line here that says why no simulated run depends on it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter

import pytest

from tests.simulation.offenders import Offence, found_in, offences

SUBMIT = "machine.py runs what is submitted at once"
ENGINE = "the engine's own thread: VirtualThread of engine.py takes its place"
RANKS = "tensor parallelism: a simulated engine has one rank"
DEVICES = "a GPU's memory or streams: a simulated engine has none"
TCP = "environment/byte_stream.py makes simulated sockets of them; numeric addresses are not looked up"
TIERS = "simulated tiers have threads in virtual time (tiers.py)"
TLS = "certificates: a simulated mesh has none"
START = "the start of a real process, its end or its ports: simulated ones are started by mesh.py"
TRIED = "a capability of the system is tried, once for a process: no answer depends on when"
SYNC = "the synchronous client: simulated clients are asyncio's"
DATE = "the date in a text; no decision depends on it"

ALLOWED: dict[tuple[str, str], tuple[int, str]] = {
    ("kvtransfer.receiver.receiver", "concurrent.futures.ThreadPoolExecutor"): (1, SUBMIT),
    ("kvtransfer.sender.sender", "concurrent.futures.ThreadPoolExecutor"): (1, SUBMIT),
    ("kvtransfer.stream", "select.poll"): (1, TCP),
    ("kvtransfer.tls_stream", "socket.socket"): (4, TLS),
    ("kvtransfer.transports.common", "socket.socket"): (2, TCP),
    ("kvtransfer.transports.nixl.device", "time.sleep"): (1, DEVICES),
    ("kvtransfer.transports.nixl.reader", "time.sleep"): (1, DEVICES),
    ("kvtransfer.transports.tcp", "socket.create_server"): (1, TCP),
    ("kvtransfer.transports.tcp", "socket.getaddrinfo"): (1, TCP),
    ("kvtransfer.transports.tcp", "socket.socket"): (1, TCP),
    ("kvtransfer.tiers.threads", "queue.SimpleQueue"): (1, TIERS),
    ("kvtransfer.tiers.threads", "threading.Thread"): (1, TIERS),
    ("pdmesh.client.channel", "grpc.aio.secure_channel"): (1, TLS),
    ("pdmesh.client.channel", "grpc.insecure_channel"): (1, SYNC),
    ("pdmesh.client.channel", "grpc.secure_channel"): (1, SYNC),
    ("pdmesh.client.client", "time.sleep"): (1, SYNC),
    ("pdmesh.engine.kernels.cpu.build", "concurrent.futures.ThreadPoolExecutor"): (1, "kernels are built before the first run"),
    ("pdmesh.engine.kernels.cpu.build", "subprocess.run"): (1, "kernels are built before the first run"),
    ("pdmesh.engine.kernels.cpu.core_table", "time.sleep"): (1, "cores are lent between real processes"),
    ("pdmesh.engine.loader.packed_cache", "time.sleep"): (1, "packed weights are made before the first run"),
    ("pdmesh.engine.kv_cache.pool", "threading.Thread"): (1, "touches memory of pools of a GiB and more"),
    ("pdmesh.engine.kv_cache.streams", "queue.SimpleQueue"): (1, DEVICES),
    ("pdmesh.engine.kv_cache.streams", "threading.Thread"): (2, DEVICES),
    ("pdmesh.engine.loop", "queue.SimpleQueue"): (1, ENGINE),
    ("pdmesh.engine.loop", "threading.Thread"): (1, ENGINE),
    ("pdmesh.engine.parallel.collectives", "socket.socket"): (1, RANKS),
    ("pdmesh.engine.parallel.collectives", "threading.Thread"): (1, RANKS),
    ("pdmesh.engine.parallel.collectives", "time.sleep"): (1, RANKS),
    ("pdmesh.engine.parallel.copies", "selectors.DefaultSelector"): (1, RANKS),
    ("pdmesh.engine.parallel.copies", "socket.socketpair"): (1, RANKS),
    ("pdmesh.engine.parallel.copies", "threading.Thread"): (2, RANKS),
    ("pdmesh.engine.parallel.tp_group", "socket.socketpair"): (2, RANKS),
    ("pdmesh.engine.parallel.tp_group", "subprocess.Popen"): (1, RANKS),
    ("pdmesh.engine.parallel.tp_group", "threading.Thread"): (1, RANKS),
    ("pdmesh.engine.parallel.tp_group", "time.sleep"): (1, RANKS),
    ("pdmesh.engine.speculation.calibration", "time.sleep"): (1, "measures a machine; a simulated engine has no proposers"),
    ("pdmesh.runtime.child", "asyncio.create_subprocess_exec"): (1, START),
    ("pdmesh.runtime.child", "os.kill"): (1, START),
    ("pdmesh.runtime.child", "os.killpg"): (1, START),
    ("pdmesh.runtime.failpoints", "os.kill"): (1, "failpoints are off, but where the environment names some"),
    ("pdmesh.runtime.failpoints", "time.sleep"): (1, "failpoints are off, but where the environment names some"),
    ("pdmesh.runtime.log", "threading.Thread"): (1, "writes logs of real processes"),
    ("pdmesh.platform.capabilities", "selectors.DefaultSelector"): (1, TRIED),
    ("pdmesh.platform.capabilities", "socket.create_connection"): (1, TRIED),
    ("pdmesh.platform.capabilities", "socket.socket"): (4, TRIED),
    ("pdmesh.platform.capabilities", "socket.socketpair"): (1, TRIED),
    ("pdmesh.platform.parent_death", "os.kill"): (2, START),
    ("pdmesh.platform.parent_death", "threading.Thread"): (1, START),
    ("pdmesh.platform.parent_death", "time.sleep"): (1, START),
    ("pdmesh.platform.parent_death_program", "os.execvp"): (1, START),
    ("pdmesh.platform.parent_death_program", "os.fork"): (1, START),
    ("pdmesh.platform.parent_death_program", "os.kill"): (2, START),
    ("pdmesh.platform.parent_death_program", "select.poll"): (1, START),
    ("pdmesh.platform.processor", "subprocess.run"): (1, TRIED),
    ("pdmesh.runtime.ports", "socket.getaddrinfo"): (1, START),
    ("pdmesh.runtime.ports", "socket.socket"): (1, START),
    ("pdmesh.runtime.rpc.channel", "grpc.aio.secure_channel"): (1, TLS),
    ("pdmesh.runtime.rpc.server", "socket.getaddrinfo"): (1, START),
    ("pdmesh.runtime.rpc.server", "socket.socket"): (1, START),
    ("pdmesh.runtime.work_threads", "concurrent.futures.ThreadPoolExecutor"): (1, SUBMIT),
    ("pdmesh.text.chat_template", "datetime.datetime.now"): (1, DATE),
    ("pdmesh.text.grammar", "threading.Thread"): (1, "compiles grammars; simulated requests have none"),
    ("pdmesh.text.grammar", "time.sleep"): (1, "compiles grammars; simulated requests have none"),
    ("router.api.vllm.responses", "datetime.datetime.now"): (1, DATE),
    ("router.auth.api_keys", "secrets.token_urlsafe"): (1, "makes an API key, at a command"),
    ("router.fleet.decode_stream", "asyncio.open_connection"): (1, "through the loop's create_connection, which is simulated"),
    ("router.tokenization.queue", "concurrent.futures.ThreadPoolExecutor"): (1, SUBMIT),
}  # fmt: skip


def test_a_simulated_run_loads_no_code_that_reaches_for_the_machine() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.simulation.offenders"],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONHASHSEED": "0"},
        check=True,
    )
    modules = json.loads(done.stdout)
    assert {"router.fleet.registry", "pdmesh.worker.assembly", "decode_service.service"} <= {name for name, _ in modules}
    found = found_in(modules)
    counts = Counter((offence.module, offence.name) for offence in found)
    new = [str(offence) for offence in found if counts[offence.module, offence.name] > _allowed(offence)]
    assert not new, f"not allowed by {__name__}: {new}"
    gone = [key for key, (number, _) in ALLOWED.items() if counts[key] < number]
    assert not gone, f"allowed, but not used so often: {gone}"


def _allowed(offence: Offence) -> int:
    return ALLOWED.get((offence.module, offence.name), (0, ""))[0]


@pytest.mark.parametrize(
    ("source", "name", "kind"),
    [
        ("import threading\nthreading.Thread(target=print).start()", "threading.Thread", "thread"),
        ("from threading import Thread as T\ndef f():\n    return T()", "threading.Thread", "thread"),
        ("from time import monotonic", "from time import monotonic", "bound"),
        ("from time import sleep\nsleep(1)", "time.sleep", "sleep"),
        ("import time as t\nwait = t.sleep", "time.sleep", "sleep"),
        ("import datetime\ndatetime.datetime.now()", "datetime.datetime.now", "clock"),
        ("from datetime import datetime\ndatetime.now()", "datetime.datetime.now", "clock"),
        ("import socket\nwith socket.socket() as s: ...", "socket.socket", "socket"),
        ("import numpy as np\nnp.random.rand()", "numpy.random", "randomness"),
        ("from os import urandom", "from os import urandom", "bound"),
        (
            "import asyncio\nasync def f():\n    await asyncio.create_subprocess_exec('ls')",
            "asyncio.create_subprocess_exec",
            "process",
        ),
    ],
)
def test_a_use_is_found(source: str, name: str, kind: str) -> None:
    [offence] = offences("module", source)
    assert (offence.name, offence.kind) == (name, kind)


@pytest.mark.parametrize(
    "source",
    [
        "import time\ntime.monotonic()",
        "import socket\ndef f(s: socket.socket) -> socket.socket: ...",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from time import monotonic",
        "import asyncio\nasync def f():\n    await asyncio.to_thread(print)",
        "import random\nrandom.random()\nrandom.Random(1)",
    ],
)
def test_what_is_replaced_and_what_only_a_type_checker_reads_is_no_offence(source: str) -> None:
    assert offences("module", source) == []
