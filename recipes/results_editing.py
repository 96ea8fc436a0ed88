"""docs/results/editing.md: dense, five masks at sparsity 0.9 and LoRA at matched bytes, IID and N_c=10.

Each method gets its own learning rate, chosen on validation with a seed that is not used afterwards. Run it with
`python recipes/results_editing.py --data FOLDER`; finished runs are kept under `--runs` and not repeated.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from fedgraft.experiment import figures
from fedgraft.experiment.config import Config, validate
from fedgraft.experiment.statistics import paired, summarise, table
from fedgraft.experiment.sweep import curve, folder_of, run_many, vary

SEEDS = (1, 2, 3)
TUNING_SEED = 0
MASKS = ("least_sensitive", "most_sensitive", "lowest_magnitude", "highest_magnitude", "random")
START = "nothing (step 0)"
RATES = {
    "dense": (0.01, 0.03, 0.1),
    "least_sensitive": (0.3, 1.0, 3.0),
    "lora": (0.1, 0.3, 1.0),
}
"""Tried learning rates by method; masks that are not named use the dense ones times three: fewer weights move."""


def base(data: str, rounds: int) -> Config:
    """K=100, 10 a round, J=4 steps of 32 images; the ridge head is solved in step 0 and stays frozen."""
    return validate(
        {
            "name": "edit",
            "data": {"source": "cifar100", "path": data},
            "partition": {"clients": 100},
            "model": {"name": "nano", "head": "ridge"},
            "local": {"steps": 4, "batch_size": 32, "momentum": 0.9},
            "schedule": {"kind": "cosine"},
            "rounds": {
                "total": rounds,
                "fraction": 0.1,
                "evaluate_every": max(1, rounds // 3),
                "checkpoint_every": 50,
            },
        }
    )


def methods(start: Config) -> dict[str, Config]:
    """The edits that are compared; LoRA's rank is chosen so that it sends as many values as the masks."""
    made = {"dense": vary(start, moves__kind="body")}
    for strategy in MASKS:
        made[strategy] = vary(
            start,
            moves__kind="masked",
            moves__mask={"strategy": strategy, "sparsity": 0.9, "samples": 1024, "rounds": 4},
        )
    # 6 blocks x (q, k, v, proj) x rank x (192 + 192) = 9,216 x rank values; 0.1 x 2.67 million is rank 29.
    lora = {"rank": 29, "alpha": 58.0, "targets": ["q", "k", "v", "proj"]}
    made["lora"] = vary(start, moves__kind="lora", moves__lora=lora)
    return made


def rates(method: str) -> tuple[float, ...]:
    """The learning rates tried for a method."""
    return RATES.get(method, tuple(3 * rate for rate in RATES["dense"]))


def deals(config: Config) -> dict[str, Config]:
    """The two ways the data is dealt."""
    return {
        "IID": vary(config, partition__kind="stratified"),
        "N_c=10": vary(config, partition__kind="classes", partition__classes_per_client=10),
    }


def main() -> None:
    """Tune, run, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", required=True)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--runs", type=Path, default=Path("runs/editing"))
    parser.add_argument("--out", type=Path, default=Path("docs/results"))
    options = parser.parse_args()
    start = base(options.data, options.rounds)
    tuning = {
        f"{deal}/{method}/{rate}": vary(
            config,
            seed=TUNING_SEED,
            local__lr=rate,
            rounds={"total": max(3, options.rounds // 3), "evaluate_every": 0},
        )
        for method, plain in methods(start).items()
        for deal, config in deals(plain).items()
        for rate in rates(method)
    }
    run_many(tuning, options.runs)
    best: dict[tuple[str, str], tuple[float, float]] = {}
    for label, config in tuning.items():
        deal, method, rate = label.split("/")
        # The loss, because accuracies of short runs differ by less than their noise.
        found = (curve(folder_of(config, options.runs), "loss")[1][-1], float(rate))
        best[deal, method] = min(best.get((deal, method), found), found)
    runs = {
        f"{deal}/{method}/{seed}": vary(config, seed=seed, local__lr=best[deal, method][1])
        for method, plain in methods(start).items()
        for deal, config in deals(plain).items()
        for seed in SEEDS
    }
    still = vary(start, moves__kind="body", local__lr=1e-12, rounds={"total": 1, "evaluate_every": 1})
    runs |= {
        f"{deal}/{START}/{seed}": vary(config, seed=seed) for deal, config in deals(still).items() for seed in SEEDS
    }
    results = run_many(runs, options.runs)
    write(runs, results, best, options)


def write(
    runs: dict[str, Config], results: dict[str, dict], best: dict[tuple[str, str], tuple[float, float]],
    options: argparse.Namespace,
) -> None:  # fmt: skip
    """The page and its figures."""
    options.out.mkdir(parents=True, exist_ok=True)
    parts, points = [], {}
    names = list(methods(base(options.data, options.rounds)))
    for deal in ("IID", "N_c=10"):

        def last(key: str, factor: float, deal: str = deal) -> dict[str, list[float]]:
            folders = {m: [folder_of(runs[f"{deal}/{m}/{s}"], options.runs) for s in SEEDS] for m in (START, *names)}
            return {m: [factor * curve(folder, key)[1][-1] for folder in found] for m, found in folders.items()}

        accuracy, loss = last("accuracy", 100), last("loss", 1)
        rows = []
        for method in (START, *names):
            one = results[f"{deal}/{method}/{SEEDS[0]}"]
            megabytes = 0.0 if method == START else (one["bytes_up"] + one["bytes_down"]) / 1e6
            tests = [100 * results[f"{deal}/{method}/{s}"]["test"]["accuracy"] for s in SEEDS]
            rate = "" if method == START else best[deal, method][1]
            spread = summarise(loss[method])
            shown = [summarise(accuracy[method]), gap(accuracy, method, 2), f"{spread.mean:.4f} ± {spread.std:.4f}"]
            rows.append([method, rate, *shown, gap(loss, method, 4), summarise(tests), f"{megabytes:.0f}"])
            if method != START:
                points[f"{method}, {deal}"] = (megabytes, summarise(accuracy[method]).mean)
        header = ["what moves", "lr", "validation (%)", "minus dense", "validation loss", "minus dense",
                  "test of the best (%)", "MB up and down"]  # fmt: skip
        parts.append(f"## {deal}\n\n{table(header, rows)}\n")
        series = {}
        for method in names:
            found = [curve(folder_of(runs[f"{deal}/{method}/{s}"], options.runs)) for s in SEEDS]
            stats = [summarise([100 * c[1][i] for c in found]) for i in range(len(found[0][0]))]
            series[method] = (found[0][0], [s.mean for s in stats], [s.std for s in stats])
        kind = "F16" if deal == "IID" else "F17"
        figures.draw(kind, options.out / f"editing-{'iid' if deal == 'IID' else 'nc10'}.png", series)
    figures.draw("bytes_accuracy", options.out / "editing-bytes.png", points)
    (options.out / "editing.md").write_text(PAGE.format(rounds=options.rounds, parts="\n".join(parts)))


def gap(scores: dict[str, list[float]], method: str, digits: int) -> str:
    """The paired difference to dense with its 95 % interval, corrected for nothing; the p-value is Holm's."""
    if method == "dense":
        return ""
    others = {m: v for m, v in scores.items() if m != "dense"}
    found = next(d for d in paired(scores["dense"], others) if d.name == method)
    mean, low, high = (f"{v:+.{digits}f}" for v in (found.difference.mean, found.difference.low, found.difference.high))
    return f"{mean} [{low}, {high}], p {found.p:.3f}"


PAGE = """# Editing: dense, sparse and low-rank, IID and not

Command: `python recipes/results_editing.py --data FOLDER --rounds {rounds}` (CIFAR-100, `nano`). 100 clients, 10 a
round, 4 steps of 32 images, {rounds} rounds, momentum 0.9, cosine. The head comes from step 0 (ridge, from summed
statistics) and stays frozen, so only the trunk differs. Sparsity 0.9 means that 90 % of the coordinates of the blocks
are frozen. Learning rates were chosen by validation loss with seed 0 and a third of the rounds, three per method; the
tables have seeds 1, 2, 3: mean ± standard deviation. Validation is measured after the last round; the test column
belongs to the round that was best on validation, step 0 included. Differences are paired by seed, with Student's 95 %
interval and Holm's p-value within a column. With three seeds intervals are wide.

{parts}
![IID](editing-iid.png)
![N_c=10](editing-nc10.png)
![bytes](editing-bytes.png)
"""

if __name__ == "__main__":
    main()
