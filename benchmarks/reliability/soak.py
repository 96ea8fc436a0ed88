"""A long run: does memory grow, do file handles pile up?

A real run of the head on digits with the batched engine in a process of its own, which reads its resident memory and
counts its open files every few rounds. The slope is a least-squares line over the rounds after a warm-up.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.reliability.outcome import ROOT, Outcome, share

WARM_UP, ENOUGH = 0.2, 2000
"""Caches and the allocator's pools fill during the first few hundred rounds; a shorter run measures only that."""
CHILD = """
import json, mmap, os, sys
import torch
torch.set_num_threads(1)
from pathlib import Path
from fedgraft.runs import loop as runs
from fedgraft.config.load import load

folder, rounds, leak = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "leak"
overrides = ["data.source=digits", "model.name=nano", "engine=batched", "partition.clients=10", "rounds.fraction=0.5",
         "local.steps=2", "local.batch_size=16", f"rounds.total={rounds}", "rounds.evaluate_every=100",
         "rounds.checkpoint_every=100", "model.head=random"]
runs.report_run = lambda *a, **k: None  # figures come after the rounds, and are not what is measured
every = max(1, rounds // 200)
kept = []

class Watch:
    look = None
    def start(self, total, done, text): pass
    def update(self, line):
        if leak:
            pages = mmap.mmap(-1, 65536)  # not from memory that was freed before
            pages.write(b"x" * 65536)
            kept.append((pages, open(os.devnull)))
        if line["round"] % every == 0:
            with open("/proc/self/statm") as file:
                pages = int(file.read().split()[1])
            size, files = pages * os.sysconf("SC_PAGE_SIZE"), len(os.listdir("/proc/self/fd"))
            print(json.dumps([line["round"], size, files]), flush=True)

runs.run(load(None, overrides), folder, Watch(), console=False)
"""


def samples(rounds: int, way: str, folder: Path) -> list[list[int]]:
    """[round, resident bytes, open files] through one run."""
    environment = {**os.environ, "FEDGRAFT_CACHE": os.environ.get("FEDGRAFT_CACHE", str(folder / "cache"))}
    command = [sys.executable, "-c", CHILD, str(folder / way), str(rounds), way]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    if done.returncode:
        raise RuntimeError(f"the run of the soak failed: {done.stderr[-300:]}")
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]


def slope(found: list[list[int]]) -> dict[str, Any]:
    """MB per 1,000 rounds and the change of open files after the warm-up."""
    late = np.array([s for s in found if s[0] >= WARM_UP * found[-1][0]], dtype=np.float64)
    fit = np.polyfit(late[:, 0], late[:, 1], 1)[0]
    return {
        "slope": float(fit) * 1000 / 1e6,
        "handles": int(late[:, 2].max() - late[0, 2]),
        "megabytes": float(late[-1, 1]) / 1e6,
        "first": float(late[0, 1]) / 1e6,
    }


def soak(scale: float) -> Outcome:
    """The run, and a shorter one that forgets to let go of memory and files."""
    rounds, few = share(10_000, scale, 200), share(800, scale, 200)
    with tempfile.TemporaryDirectory() as name:
        ours = slope(samples(rounds, "ours", Path(name)))
        leaky = slope(samples(few, "leak", Path(name)))
    judged = rounds >= ENOUGH
    return Outcome(
        ours["handles"] <= 0 and (ours["slope"] < 1.0 or not judged),
        f"{rounds:,} rounds: {ours['slope']:+.3f} MB per 1,000 rounds after the first {WARM_UP:.0%} "
        f"({ours['first']:.0f} MB then, {ours['megabytes']:.0f} MB at the end), open files {ours['handles']:+d}"
        + ("" if judged else f"; fewer than {ENOUGH:,} rounds are too short to judge the slope"),
        {"64 kB and a file kept per round": f"{leaky['slope']:+.1f} MB per 1,000, open files {leaky['handles']:+d}"},
        # Half of what is kept on purpose must show on top of what a run of this length shows anyway.
        leaky["slope"] >= max(1.0, ours["slope"] + 4) and leaky["handles"] > 0,
        {"rounds": rounds, "ours": ours, "leaky": leaky},
        judged,
    )
