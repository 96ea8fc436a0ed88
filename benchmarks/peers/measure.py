"""One process tree, watched from outside: wall time, peak memory, its processor time, and how busy others were.

A run is recognised by a word in its environment, which every descendant inherits, so that daemons of Ray which left
the tree are counted and, when the run is over, ended. Memory is PSS: pages that processes share count once.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

MARK = "FEDGRAFT_BENCHMARK_RUN"
TICK = os.sysconf("SC_CLK_TCK")
EVERY = 0.25


@dataclass
class Measured:
    """What one run cost."""

    code: int
    seconds: float
    peak_mb: float
    cpu_seconds: float
    other_cpu_seconds: float
    """Processor time that everybody else had meanwhile."""
    steal_seconds: float
    cores: int
    pids: dict[int, float] = field(default_factory=dict, repr=False)

    @property
    def other_load(self) -> float:
        """Cores that others (and the hypervisor) had on average."""
        return (self.other_cpu_seconds + self.steal_seconds) / max(self.seconds, 1e-9)


def watch(command: list[str], env: dict[str, str], log: Path, timeout: float) -> Measured:
    """Run a command to its end, sampling its tree; a run beyond the timeout is ended and has code -9."""
    mark = uuid.uuid4().hex
    before, began = machine(), time.perf_counter()
    times: dict[int, float] = {}
    peak = 0.0
    with log.open("wb") as out:
        process = subprocess.Popen(command, env={**env, MARK: mark}, stdout=out, stderr=subprocess.STDOUT)
        try:
            while process.poll() is None and time.perf_counter() - began < timeout:
                pids = [process.pid, *marked(mark)]
                peak = max(peak, sum(memory(pid) for pid in set(pids)))
                times |= {pid: found for pid in set(pids) if (found := cpu(pid)) is not None}
                with suppress(subprocess.TimeoutExpired):
                    process.wait(EVERY)
        finally:  # also when somebody stops the benchmark: nothing is left behind
            seconds, late = time.perf_counter() - began, process.poll() is None
            after = machine()
            end([*([process.pid] if late else []), *marked(mark)])
            process.wait()
    for _ in range(50):  # the next run begins when this one's last process is gone
        if not marked(mark):
            break
        time.sleep(0.1)
    busy, steal = (b - a for a, b in zip(before, after, strict=True))
    own = sum(times.values())
    return Measured(
        -9 if late else process.returncode, seconds, peak, own, max(0.0, busy - own), steal, os.cpu_count() or 1, times
    )


def marked(mark: str) -> list[int]:
    """Processes that carry the mark in their environment."""
    wanted, found = f"{MARK}={mark}".encode(), []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with suppress(OSError):
                if wanted in (folder / "environ").read_bytes():
                    found.append(int(folder.name))
    return found


def memory(pid: int) -> float:
    """Proportional set size in MB; 0 for a process that is gone."""
    with suppress(OSError, IndexError, ValueError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) / 1024
    return 0.0


def cpu(pid: int) -> float | None:
    """Processor seconds of a process so far."""
    with suppress(OSError, IndexError, ValueError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICK
    return None


def machine() -> tuple[float, float]:
    """Busy and stolen processor seconds of the whole machine since it started."""
    user, nice, system, _, _, irq, soft, steal = map(int, Path("/proc/stat").read_text().split()[1:9])
    return (user + nice + system + irq + soft) / TICK, steal / TICK


def end(pids: list[int]) -> None:
    """End what a run has left behind."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
