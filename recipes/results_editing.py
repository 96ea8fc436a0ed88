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
RATES = {
    "dense": (0.003, 0.01, 0.03),
    "least_sensitive": (0.1, 1.0, 10.0),
    "lora": (0.03, 0.1, 0.3),
}
"""Tried learning rates by method; masks that are not named use the dense ones times three: fewer weights move."""


def base(data: str, rounds: int) -> Config:
    """K=100, 10 a round, J=4 steps of 32 images; the head is solved in step 0 and stays frozen."""
    return validate(
        {
            "name": "edit",
            "data": {"source": "cifar100", "path": data},
            "partition": {"clients": 100},
            "model": {"name": "nano", "head": "probe"},
            "local": {"steps": 4, "batch_size": 32, "momentum": 0.9},
            "schedule": {"kind": "cosine"},
            "rounds": {"total": rounds, "fraction": 0.1, "evaluate_every": max(1, rounds // 3), "checkpoint_every": 50},
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
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--runs", type=Path, default=Path("runs/editing"))
    parser.add_argument("--out", type=Path, default=Path("docs/results"))
    options = parser.parse_args()
    start = base(options.data, options.rounds)
    tuning = {
        f"{deal}/{method}/{rate}": vary(
            config, seed=TUNING_SEED, local__lr=rate, rounds__total=max(3, options.rounds // 3)
        )
        for method, plain in methods(start).items()
        for deal, config in deals(plain).items()
        for rate in rates(method)
    }
    tuned = run_many(tuning, options.runs)
    best = {}
    for label, summary in tuned.items():
        deal, method, rate = label.split("/")
        score = summary["validation"]["accuracy"]
        if score > best.get((deal, method), (-1.0, 0.0))[0]:
            best[deal, method] = (score, float(rate))
    runs = {
        f"{deal}/{method}/{seed}": vary(config, seed=seed, local__lr=best[deal, method][1])
        for method, plain in methods(start).items()
        for deal, config in deals(plain).items()
        for seed in SEEDS
    }
    results = run_many(runs, options.runs)
    write(runs, results, best, options)


def write(
    runs: dict[str, Config], results: dict[str, dict], best: dict[tuple[str, str], tuple[float, float]],
    options: argparse.Namespace,
) -> None:  # fmt: skip
    """The page and its figures."""
    options.out.mkdir(parents=True, exist_ok=True)
    parts = []
    points = {}
    names = list(methods(base(options.data, options.rounds)))
    for deal in ("IID", "N_c=10"):
        scores = {m: [100 * results[f"{deal}/{m}/{s}"]["test"]["accuracy"] for s in SEEDS] for m in names}
        gaps = {d.name: d for d in paired(scores["dense"], {m: scores[m] for m in names if m != "dense"})}
        rows = []
        for method in names:
            one = results[f"{deal}/{method}/{SEEDS[0]}"]
            megabytes = (one["bytes_up"] + one["bytes_down"]) / 1e6
            gap = gaps.get(method)
            shown = (
                ""
                if gap is None
                else f"{gap.difference.mean:+.2f} [{gap.difference.low:+.2f}, {gap.difference.high:+.2f}]"
            )
            rows.append([method, best[deal, method][1], summarise(scores[method]), shown, f"{megabytes:.0f}"])
            points[f"{method}, {deal}"] = (megabytes, summarise(scores[method]).mean)
        header = ["what moves", "lr", "test (%)", "minus dense, 95 % interval", "MB up and down"]
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


PAGE = """# Editing: dense, sparse and low-rank, IID and not

Command: `python recipes/results_editing.py --data FOLDER --rounds {rounds}` (CIFAR-100, `nano`). 100 clients, 10 a
round, 4 steps of 32 images, {rounds} rounds, momentum 0.9, cosine. The head comes from step 0 (summed logistic
regression) and stays frozen, so only the trunk differs. Sparsity 0.9 means that 90 % of the coordinates of the blocks
are frozen. Learning rates were chosen on validation with seed 0 and a third of the rounds; the table has seeds 1, 2, 3:
mean ± standard deviation.

{parts}
![IID](editing-iid.png)
![N_c=10](editing-nc10.png)
![bytes](editing-bytes.png)
"""

if __name__ == "__main__":
    main()
