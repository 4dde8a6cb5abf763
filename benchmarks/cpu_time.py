"""CPU time of a process or of its event loop, from the kernel's own counters (nanoseconds)."""

from pathlib import Path


def process_cpu_ns(pid: int) -> int:
    """Time on a core of all threads of a process."""
    return sum(_on_cpu_ns(task) for task in Path(f"/proc/{pid}/task").iterdir())


def event_loop_cpu_ns(pid: int) -> int:
    """Time on a core of a process's main thread, which runs its event loop (a worker's engine has a thread of its own)."""
    return _on_cpu_ns(Path(f"/proc/{pid}/task/{pid}"))


def _on_cpu_ns(task: Path) -> int:
    return int((task / "schedstat").read_text().split()[0])
