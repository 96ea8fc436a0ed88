"""Honest clients that are very unlike each other: the default bounds on updates and claims must refuse none of them."""

from __future__ import annotations

import json
import statistics
import tempfile
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
from tests.support.tiny import tiny, without_pictures

from benchmarks.reliability.outcome import Outcome, share
from fedgraft.config.federate import federate
from fedgraft.data.partition import make_partition
from fedgraft.data.partition.partition import Partition
from fedgraft.runs import loop as running
from fedgraft.runs.setup import setup_of
from fedgraft.server.example_counts import FACTOR, ExampleCounts

ALGORITHMS = ("fedavg", "fedprox", "fednova", "scaffold", "fedadam", "feddyn")
BASE = [
    "data.limit=400",
    "partition.kind=dirichlet",
    "partition.alpha=0.1",
    "partition.minimum=2",
    "partition.clients=8",
]
BASE += ["trainable.kind=everything", "rounds.evaluate_every=0", "rounds.test=false", "engine=reference"]
STEPS = (("local.steps=4",), ("local.steps=none", "local.epochs=2"))


def uneven(scale: float) -> Outcome:
    """Ratios of an update's length to the median of its round, and what the bound refused."""
    rounds, seeds = share(12, scale, 4), range(share(2, scale, 1))
    runs = [(a, s, e) for a in ALGORITHMS for s in seeds for e in STEPS]
    found = [_run([*BASE, f"algorithm.name={a}", f"seed={s}", *e, f"rounds.total={rounds}"]) for a, s, e in runs]
    updates, refused, worst = (sum(f[0] for f in found), sum(f[1] for f in found), max(f[2] for f in found))
    # Fixed steps: where epochs are counted, who takes more steps may come further, and the giant is the only one.
    strict = _run([*BASE, "rounds.norm_factor=1.0", *STEPS[0], f"rounds.total={rounds}"])[1]
    cut, sizes = _claims(share(200, scale, 50))
    return Outcome(
        refused == 0,
        f"{len(runs)} runs of {len(ALGORITHMS)} algorithms over 8 clients at dirichlet 0.1, one with ten times the "
        f"images of any other: {refused} of {updates:,} benign updates refused; the longest is {worst:.1f} times the "
        f"median of its round (bound 30, times the steps it takes over the median's); claims: "
        f"in {len(sizes)} federations at dirichlet 0.1 the largest client has "
        f"at most {max(sizes):.0f} times the median number of images, {cut:.1%} of all images count for less (bound "
        f"{FACTOR:g})",
        {"a bound of the median itself": f"{strict} benign updates refused"},
        strict > 0,
        {"worst": worst, "updates": updates, "refused": [str(r) for r, f in zip(runs, found, strict=True) if f[1]]},
    )


def _run(overrides: list[str]) -> tuple[int, int, float]:
    """(updates that counted, updates refused, longest over the median of its round)."""
    config = tiny(*overrides)
    data = federate(config)
    data = replace(data, partition=with_a_giant(data.partition))
    with tempfile.TemporaryDirectory() as name, without_pictures():
        folder = Path(name) / "run"
        running.run(config, folder, console=False, build=lambda secret: (setup_of(config, data), None))
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rounds = [line for line in lines if line["round"]]
    norms = [line["clients"]["norm"] for line in rounds if "clients" in line]
    worst = max((max(n) / statistics.median(n) for n in norms if statistics.median(n) > 0), default=0.0)
    return sum(map(len, norms)), sum(len(line["dropped"]) for line in rounds), worst


def with_a_giant(made: Partition) -> Partition:
    """The same partition in which everybody but the largest client keeps at most a tenth of its number of rows."""
    parts = [made.rows[a:b] for a, b in pairwise(made.offsets)]
    most = max(map(len, parts))
    kept = [part if len(part) == most else part[: max(2, most // 10)] for part in parts]
    offsets = np.cumsum([0, *map(len, kept)])
    names = tuple(f"client {k}" for k in range(len(parts)))
    return replace(made, rows=np.concatenate(kept), offsets=offsets, names=names)


def _claims(federations: int) -> tuple[float, list[float]]:
    """Share of images that do not count in full, and the largest client over the median, by federation."""
    labels, lost, total, ratios = np.arange(4000) % 10, 0.0, 0, []
    for seed in range(federations):
        made: Partition = make_partition("dirichlet", labels, labels[:100], 8, seed, alpha=0.1, min_size=2)
        sizes = dict(enumerate(np.diff(made.offsets).tolist()))
        example_counts = ExampleCounts(sizes, dealt=False)
        lost += sum(n - example_counts.counted(n) for n in sizes.values())
        total += sum(sizes.values())
        ratios.append(max(sizes.values()) / statistics.median(sizes.values()))
    return lost / total, ratios
