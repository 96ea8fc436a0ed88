"""docs/results/foundations.md: linear probe, head-only FedAvg over N_c, a few rounds of full fine-tuning.

Run it with `python recipes/results_foundations.py --data FOLDER`; FOLDER holds CIFAR-100 in any form the data guide
names. Finished runs are kept under `--runs` and not repeated.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from fedgraft.config.load import Config, validate
from fedgraft.report import figures
from fedgraft.report.statistics import summarise, table
from fedgraft.runs.sweep import curve, folder_of, run_many, vary

SEEDS = (0, 1, 2)
SHARES = {"1": 1, "5": 5, "10": 10, "50": 50, "IID": None}


def base(data: str) -> Config:
    """K=100, a tenth of the clients a round, J=4 steps of 64 images: the documents' setting, on the small network."""
    return validate(
        {
            "name": "head",
            "data": {"source": "cifar100", "path": data},
            "partition": {"clients": 100},
            "model": {"name": "nano", "head": "random"},
            "moves": {"kind": "head"},
            "local": {"steps": 4, "batch_size": 64, "lr": 0.03, "momentum": 0.9},
            "schedule": {"kind": "cosine"},
            "rounds": {"total": 500, "fraction": 0.1, "evaluate_every": 25, "checkpoint_every": 100},
        }
    )


def federated(config: Config, share: int | None) -> Config:
    """The config with exactly so many classes per client, or IID."""
    if share is None:
        return vary(config, partition__kind="stratified")
    return vary(config, partition__kind="classes", partition__classes_per_client=share)


def main() -> None:
    """Run everything that is missing, then write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", required=True, help="folder with CIFAR-100")
    parser.add_argument("--runs", type=Path, default=Path("runs/foundations"))
    parser.add_argument("--out", type=Path, default=Path("docs/results"))
    options = parser.parse_args()
    start = base(options.data)
    runs: dict[str, Config] = {}
    for seed in SEEDS:
        probe = vary(
            start, name="probe", seed=seed, model__head="probe", centralized__kind="probe", centralized__epochs=15
        )
        runs[f"probe/{seed}"] = vary(probe, local__lr=0.003)
        for label, share in SHARES.items():
            runs[f"head {label}/{seed}"] = federated(vary(start, seed=seed), share)
        full = vary(
            start, name="full", seed=seed, model__head="probe", moves__kind="everything", data__augment=["flip"]
        )
        full = vary(full, local__lr=0.01, rounds__total=10, rounds__evaluate_every=1, local__batch_size=32)
        runs[f"full 10/{seed}"] = federated(full, 10)
    central = [label for label in runs if label.startswith("probe/")]
    results = run_many(runs, options.runs, central=central)
    write(runs, results, options.runs, options.out)


def write(runs: dict[str, Config], results: dict[str, dict], root: Path, out: Path) -> None:
    """The page and its figures."""
    out.mkdir(parents=True, exist_ok=True)
    names = list(dict.fromkeys(label.rpartition("/")[0] for label in runs))
    rows, series, losses = [], {}, {}
    for name in names:
        test = summarise([100 * results[f"{name}/{s}"]["test"]["accuracy"] for s in SEEDS])
        held = summarise([100 * results[f"{name}/{s}"]["validation"]["accuracy"] for s in SEEDS])
        sent = results[f"{name}/0"]["bytes_up"] + results[f"{name}/0"]["bytes_down"]
        seen = [dict(zip(*curve(folder_of(runs[f"{name}/{s}"], root)), strict=True)) for s in SEEDS]
        early = summarise([100 * s[50] for s in seen]) if all(50 in s for s in seen) else ""
        last = summarise([100 * list(s.values())[-1] for s in seen])
        rounds = ", ".join(str(results[f"{name}/{s}"]["best_round"]) for s in SEEDS)
        rows.append([name, early, last, held, rounds, test, f"{sent / 1e6:.1f}"])
        if name.startswith("head"):
            curves = [curve(folder_of(runs[f"{name}/{s}"], root)) for s in SEEDS]
            lost = [curve(folder_of(runs[f"{name}/{s}"], root), "loss") for s in SEEDS]
            label = name.removeprefix("head ")
            label = label if label == "IID" else f"N_c={label}"
            stats = [summarise([100 * c[1][i] for c in curves]) for i in range(len(curves[0][0]))]
            series[label] = (curves[0][0], [s.mean for s in stats], [s.std for s in stats])
            mean = [summarise([c[1][i] for c in lost]) for i in range(len(lost[0][0]))]
            losses[label] = (lost[0][0], [s.mean for s in mean], [s.std for s in mean])
    title = "Head-only FedAvg by classes per client"
    figures.curves(out / "foundations-accuracy.png", series, xlabel="round", ylabel="accuracy (%)", title=title)
    figures.curves(out / "foundations-loss.png", losses, xlabel="round", ylabel="loss", title=title)
    text = PAGE.format(table=table(HEADER, rows))
    (out / "foundations.md").write_text(text)


HEADER = [
    "run", "validation, round 50 (%)", "validation, last round (%)", "validation, best (%)", "best round by seed",
    "test of the best (%)", "MB up and down",
]  # fmt: skip

PAGE = """# Foundations: probe, head-only FedAvg, full fine-tuning

Command: `python recipes/results_foundations.py --data FOLDER` (CIFAR-100; `nano`, 32 px).
Three seeds (0, 1, 2): each is its own validation split, partition, cohort schedule and head. Mean ± standard deviation.
Best round by validation (5,000 images held out of train); the test set is used once per run.

{table}

- `probe`: all training images in one place, linear head, 15 epochs after an L-BFGS start.
- `head N`: FedAvg on the head alone from a random head; 100 clients with exactly N classes each, 10 a round, 4 steps of
  64 images, 500 rounds, lr 0.03 falling as a cosine, momentum 0.9.
- The fewer classes a client holds, the slower the head learns: the gap is widest early and closes as the rate falls.
- `full 10`: FedAvg on all 2.7 million weights, N_c=10, from a probe head; 10 rounds, 4 steps of 32 images, lr 0.01.
  A best round of 0 is the model of step 0: then these few rounds did not improve on the probe head.

![accuracy](foundations-accuracy.png)
![loss](foundations-loss.png)
"""

if __name__ == "__main__":
    main()
