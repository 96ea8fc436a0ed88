"""Are edits of least-sensitive coordinates more additive than edits of random or most-sensitive ones?

`python -m reproduction.merge_test pacs --model FOLDER --data FOLDER`. Every task (a domain of PACS, a half of the
classes of CIFAR-100) is a client that trains alone, from the same pretrained backbone, with the same frozen head and
the same mask. Its edit is what it changed. The edits are then merged, by their sum and by the rules of `edit add`, and
every task is measured on its own test images: base, its own edit, the merged edits. Additivity is the share of the mean
gain that the merged model keeps. The update is matched in norm to dense training, so that strategies move alike.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from fedgraft.aggregate.mean import weighted_mean
from fedgraft.aggregate.merging import dare, ties
from fedgraft.config.load import Config, load, to_toml
from fedgraft.core.rng import torch_stream
from fedgraft.core.state import ServerState
from fedgraft.metrics.evaluate import evaluate
from fedgraft.metrics.statistics import summarise
from fedgraft.runs.callbacks import Callback
from fedgraft.runs.loop import run_setup
from fedgraft.runs.open_run import OpenRun
from fedgraft.runs.setup import RunSetup, setup_of
from reproduction.statistics import paired

STRATEGIES = ("least_sensitive", "random", "most_sensitive")
RULES = ("sum", "mean", "ties", "dare")
COEFFICIENTS = (0.1, 0.25, 0.5, 0.75, 1.0)
"""What the sum is multiplied by, as task arithmetic tunes it; 1 is the sum itself, one over tasks the mean."""
TASKS: Mapping[str, tuple[str, ...]] = {
    "pacs": ("partition.kind=by_site", "partition.clients=4", "data.source=parquet"),
    "halves": (
        "partition.kind=groups",
        f"partition.groups=[{list(range(50))},{list(range(50, 100))}]",
        "partition.clients=2",
        "data.source=cifar100",
        "partition.test=all_of_my_classes",
    ),
    "digits": ("partition.kind=groups", "partition.groups=[[0,1,2,3,4],[5,6,7,8,9]]", "partition.clients=2"),
}
BASE = (
    "algorithm.name=local_only",
    "trainable.kind=sparse",
    "trainable.head_too=false",
    "trainable.match_norm=100",
    "rounds.fraction=1.0",
    "rounds.evaluate_every=0",
    "rounds.test=false",
    "workers=1",
)


def merged(edits: Tensor, seed: int) -> dict[str, Tensor]:
    """One vector from several edits (m, k), by each rule; means are scaled back to sums, as task arithmetic has it."""
    m, even = len(edits), torch.ones(len(edits), dtype=torch.float64)
    return {
        "sum": edits.sum(0),
        "mean": weighted_mean(edits, even),
        "ties": ties(edits, even, 0.2),
        "dare": m * dare(edits, even, 0.5, torch_stream(seed, "merge_test")),
    }


def measured(setup: RunSetup, opened: OpenRun, state: ServerState, start: Tensor) -> dict[str, Any]:
    """Accuracy of every task with no edit, with its own, and with all of them merged; percent."""
    clients, context = range(setup.federation.clients), opened.context
    edits = torch.stack([state.personal[k] - start for k in clients])

    def accuracy(vector: Tensor, k: int) -> float:
        context.load_model(vector)
        assert context.tests is not None
        return 100 * evaluate(context.network, context.tests, setup.task.data.test_rows(k), 128).accuracy

    base = [accuracy(start, k) for k in clients]
    own = [accuracy(start + edits[k], k) for k in clients]
    gain = sum(own) - sum(base)
    found: dict[str, Any] = {"base": base, "own": own, "gain": gain / len(own), "norm": float(edits.norm(dim=1).mean())}
    unit = torch.nn.functional.normalize(edits.double(), dim=1)
    pairs = (unit @ unit.T)[~torch.eye(len(unit), dtype=torch.bool)]
    found["cosine"] = float(pairs.mean())
    for rule, edit in merged(edits, setup.config.seed).items():
        all_ = [accuracy(start + edit, k) for k in clients]
        found[rule] = {"accuracy": all_, "additivity": (sum(all_) - sum(base)) / gain if gain > 0 else float("nan")}
    total = edits.sum(0)
    found["swept"] = {}
    for coefficient in COEFFICIENTS:
        merged_accuracy = [accuracy(start + coefficient * total, k) for k in clients]
        found["swept"][f"{coefficient:g}"] = (sum(merged_accuracy) - sum(base)) / len(base)
    return found


def one(config: Config, folder: Path) -> dict[str, Any]:
    """Train every task alone and measure; a finished folder is measured from what it holds."""
    result = folder / "merge.json"
    if result.is_file():
        return dict(json.loads(result.read_text(encoding="utf-8")))
    starts: list[Tensor] = []

    class Begin(Callback):
        def on_training_start(self, setup: RunSetup, opened: OpenRun, state: ServerState) -> None:
            starts.append(state.vector.clone())

    _, done = run_setup(
        lambda secret: (setup_of(config, secret=secret), None),
        folder,
        config.digest,
        to_toml(config),
        None,
        False,
        [Begin()],
    )
    assert done is not None, f"{folder} is finished and has no measurement; delete it"
    found = measured(*done, starts[0])
    result.write_text(json.dumps(found, indent=1), encoding="utf-8")
    return found


def table(rows: Sequence[tuple[str, float, int, Mapping[str, Any]]]) -> str:
    """A Markdown table of all runs."""
    head = "| strategy | rate | seed | base | own | gain | cosine | sum | mean | TIES | DARE |"
    lines = [head, "|" + "---|" * 11]
    for strategy, rate, seed, r in rows:
        numbers = [sum(r[k]) / len(r[k]) for k in ("base", "own")]
        shares = [100 * r[rule]["additivity"] for rule in RULES]
        told = [f"{n:.1f}" for n in (*numbers, r["gain"])] + [f"{r['cosine']:.2f}"] + [f"{s:.0f} %" for s in shares]
        lines.append(f"| {strategy} | {rate:g} | {seed} | " + " | ".join(told) + " |")
    return "\n".join(lines)


def summary(rows: Sequence[tuple[str, float, int, Mapping[str, Any]]]) -> str:
    """Means over seeds by rate and strategy, and how least-sensitive edits differ from the others on the same seeds."""
    lines = ["| rate | strategy | seeds | gain alone | sum keeps | mean | TIES | DARE | cosine |", "|" + "---|" * 9]
    shares: dict[tuple[float, str], dict[int, float | None]] = {}
    for rate in dict.fromkeys(row[1] for row in rows):
        for strategy in STRATEGIES:
            mine = {seed: r for name, lr, seed, r in rows if (name, lr) == (strategy, rate)}
            if not mine:
                continue
            shares[rate, strategy] = {seed: 100 * r["sum"]["additivity"] for seed, r in mine.items()}
            kept = [_spread([100 * r[rule]["additivity"] for r in mine.values()]) + " %" for rule in RULES]
            alone, cosine = (
                _spread([r["gain"] for r in mine.values()]),
                _spread([r["cosine"] for r in mine.values()], 2),
            )
            lines.append(f"| {rate:g} | {strategy} | {len(mine)} | {alone} | {' | '.join(kept)} | {cosine} |")
    lines += ["", "| rate | what the sum keeps, points of additivity, least sensitive minus | |", "|---|---|---|"]
    for (rate, strategy), series in shares.items():
        effect = paired(shares.get((rate, STRATEGIES[0]), {}), series) if strategy != STRATEGIES[0] else None
        lines += [f"| {rate:g} | {strategy} | {effect} |"] if effect else []
    return "\n".join(lines)


def swept(rows: Sequence[tuple[str, float, int, Mapping[str, Any]]]) -> str:
    """Points gained by the sum of all edits times a coefficient, means over seeds; empty where it was not measured."""
    lines = ["| rate | strategy | seeds | gain alone | " + " | ".join(f"x {c:g}" for c in COEFFICIENTS) + " |"]
    lines.append("|" + "---|" * (4 + len(COEFFICIENTS)))
    for rate in dict.fromkeys(row[1] for row in rows):
        for strategy in STRATEGIES:
            mine = [r for name, lr, _, r in rows if (name, lr) == (strategy, rate) and "swept" in r]
            if not mine:
                continue
            kept = [_spread([r["swept"][f"{c:g}"] for r in mine]) for c in COEFFICIENTS]
            alone = _spread([r["gain"] for r in mine])
            lines.append(f"| {rate:g} | {strategy} | {len(mine)} | {alone} | {' | '.join(kept)} |")
    return "\n".join(lines) if len(lines) > 2 else ""


def _spread(values: Sequence[float], digits: int = 1) -> str:
    """Mean ± standard deviation."""
    found = summarise(values)
    return f"{found.mean:.{digits}f}" + (f" ± {found.std:.{digits}f}" if found.count > 1 else "")


def main(
    tasks: Annotated[str, typer.Argument(help="pacs, halves, or digits (seconds)")],
    model: Annotated[str, typer.Option("--model", help="folder of the network")] = "nano",
    data: Annotated[str | None, typer.Option("--data", help="folder of the data")] = None,
    rates: Annotated[str, typer.Option("--rates", help="learning rates before norm matching")] = "0.01,0.03",
    seeds: Annotated[int, typer.Option("--seeds")] = 3,
    out: Annotated[Path, typer.Option("--out", "-o")] = Path("runs/merge_test"),
    more: Annotated[list[str] | None, typer.Argument(help="further options, key=value")] = None,
) -> None:
    """Train, merge, measure, and print the table."""
    rows = []
    for seed in range(seeds):  # so that what there is of an unfinished test compares strategies
        for strategy in STRATEGIES:
            for rate in (float(r) for r in rates.split(",")):
                place = [f"data.path={json.dumps(data)}"] if data else []
                told = [f"model.name={json.dumps(model)}", f"seed={seed}", f"local.lr={rate}", *place, *(more or [])]
                config = load(None, [*BASE, *TASKS[tasks], f"trainable.sparse.strategy={strategy}", *told])
                rows.append((strategy, rate, seed, one(config, out / f"{tasks}-{strategy}-{rate:g}-{seed}")))
                (out / f"{tasks}.md").write_text(
                    f"{summary(rows)}\n\n{swept(rows)}\n\n{table(rows)}\n", encoding="utf-8"
                )
                typer.echo(table(rows[-1:]).splitlines()[-1])
    typer.echo(table(rows))
    typer.echo(summary(rows))
    typer.echo(swept(rows))


if __name__ == "__main__":
    typer.run(main)
