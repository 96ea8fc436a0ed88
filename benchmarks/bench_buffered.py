"""Buffered against synchronous rounds, one of four sites ten times slower: the virtual time to a target accuracy.

Both train the same network on the same division of the digits, until the accuracy on validation images first reaches
the target. Time is that of the virtual clock (`partition.speed=[1,1,1,10]`): a synchronous round takes 10, and a
buffered step waits for three answers. Each run is repeated from its log (`fedgraft verify --replay`).

    python -m benchmarks.bench_buffered

prints a markdown table and writes runs/benchmarks/buffered.json.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fedgraft.config.load import load
from fedgraft.core.files import read_metrics
from fedgraft.local.memory import one_thread
from fedgraft.runs.loop import run
from fedgraft.runs.replay import replay_differences

OUT = Path("runs") / "benchmarks" / "buffered.json"
BAR = 2.0
"""How many times sooner the buffered run must reach the target."""
COMMON = [
    "model.name=tiny",
    "model.head=random",
    "data.source=digits",
    "data.image_size=16",
    "trainable.kind=everything",
    "partition.clients=4",
    "partition.speed=[1,1,1,10]",
    "rounds.fraction=1.0",
    "rounds.evaluate_every=1",
    "local.steps=8",
    "local.batch_size=16",
    "local.lr=0.03",
    "local.momentum=0.0",
    "engine=reference",
    "workers=1",
]
SYNCHRONOUS = ["rounds.total=40"]
BUFFERED = ["rounds.kind=buffered", "rounds.buffer=3", "rounds.total=100"]
DIVISIONS = {
    "stratified": ["partition.kind=stratified"],
    "dirichlet 0.3": ["partition.kind=dirichlet", "partition.alpha=0.3"],
}


@dataclass(frozen=True)
class Comparison:
    """Both ways on one division: the virtual time to the target."""

    division: str
    seed: int
    target: float
    synchronous: float | None
    """None: never reached."""
    buffered: float | None
    repeated: bool
    """Both runs were repeated from their logs, to the same bits."""

    @property
    def factor(self) -> float | None:
        """How many times sooner the buffered run is there."""
        if self.synchronous is None or self.buffered is None:
            return None
        return self.synchronous / self.buffered


def time_to(folder: Path, target: float) -> float | None:
    """Return the virtual time at which the validation accuracy first reached the target; None: never."""
    for line in read_metrics(folder):
        if "clock" in line and line.get("accuracy", 0.0) >= target:
            return float(line["clock"])
    return None


def comparisons(seeds: int, target: float) -> Iterator[Comparison]:
    """Run both ways on every division with every seed."""
    for division, options in DIVISIONS.items():
        for seed in range(seeds):
            times = {}
            repeated = True
            with tempfile.TemporaryDirectory() as temporary:
                for kind, rounds in (("synchronous", SYNCHRONOUS), ("buffered", BUFFERED)):
                    folder = Path(temporary) / kind
                    run(load(None, [*COMMON, *options, *rounds, f"seed={seed}"]), folder, console=False)
                    times[kind] = time_to(folder, target)
                    repeated = repeated and not replay_differences(folder)
            yield Comparison(division, seed, target, times["synchronous"], times["buffered"], repeated)


def main() -> None:
    """Run the comparisons, print the table and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--target", type=float, default=0.85)
    arguments = parser.parse_args()
    print("| division | seed | target | synchronous | buffered | sooner | repeated bit for bit |")
    print("|---|---|---|---|---|---|---|")
    rows = []
    with one_thread():
        for row in comparisons(arguments.seeds, arguments.target):
            factor = "never" if row.factor is None else f"{row.factor:.1f}x"
            print(
                f"| {row.division} | {row.seed} | {row.target:.0%} | {row.synchronous} | {row.buffered} | {factor} | "
                f"{'yes' if row.repeated else 'no'} |",
                flush=True,
            )
            rows.append(vars(row) | {"factor": row.factor})
    OUT.parent.mkdir(parents=True, exist_ok=True)
    OUT.write_text(json.dumps({"bar": BAR, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
