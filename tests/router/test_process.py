"""The router as a process: ready line, no torch, exit on SIGTERM, usable errors."""

import json
import signal
import subprocess
import sys
from pathlib import Path

NO_TORCH = """
import sys
import router.main
print(sorted(name for name in sys.modules if name.split(".")[0] in ("torch", "transformers") or name.startswith("pdmesh.engine")))
"""


def test_router_imports_neither_torch_nor_engine() -> None:
    done = subprocess.run([sys.executable, "-c", NO_TORCH], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_starts_alone_and_stops_on_sigterm(model_folder: Path) -> None:
    command = [sys.executable, "-m", "router", "--port", "0", "--models", f"tiny={model_folder}", "--exit-with-parent"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        ready = json.loads(process.stdout.readline())
        assert ready["ready"] is True and ready["address"].startswith("127.0.0.1:")
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=20) == 0
    finally:
        process.kill()
        process.communicate()


def test_wrong_setting_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "router", "--port", "0", "--models", f"tiny={tmp_path}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "tokenizer.json" in done.stderr and "Traceback" not in done.stderr
