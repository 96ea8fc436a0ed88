"""docs/results/algorithms.md: does similarity of representations help, and what do liars do to each rule?

Four studies: alignment weights against FedAvg and random weights (a training body, N_c classes per client); one body
per client mixed by similarity against the mean, a constant of the same size and local training (s shards per
client); groups of clients with separate classes; the attack table. Run it with
`python recipes/results_algorithms.py --cifar100 FILE --cifar10 FILE`; finished runs are kept under `--runs` and not
repeated. `--tiny` runs every step on digits with a drawn network, to see that it works.
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import safetensors.torch

from fedgraft.engines.hostile import NAMES
from fedgraft.experiment import figures
from fedgraft.experiment.attack import HONEST, RULES, Cell, attack_table
from fedgraft.experiment.attack import write as write_cells
from fedgraft.experiment.config import Config, validate
from fedgraft.experiment.statistics import paired, summarise, table
from fedgraft.experiment.sweep import curve, folder_of, run_many, vary

TUNING_SEED = 0
SIMILARITIES = ("cka_linear", "cka_rbf", "cka_debiased", "covariance", "probe_cka", "label_histogram")
Results = Mapping[str, dict[str, Any]]


@dataclass(frozen=True)
class Plan:
    """How large the studies are."""

    cifar10: dict[str, Any]
    cifar100: dict[str, Any]
    nano: str = "nano"
    resnet: str = "resnet18:width=16,norm=group"
    seeds: tuple[int, ...] = (1, 2, 3)
    rounds: int = 30
    classes: tuple[int, ...] = (1, 5, 10)
    shards: tuple[int, ...] = (2, 5, 10)
    rates: tuple[float, ...] = (0.003, 0.01, 0.03)
    similarities: tuple[str, ...] = SIMILARITIES
    attacks: tuple[str, ...] = NAMES
    rules: tuple[str, ...] = RULES
    clients: int = 100
    probe: int = 256
    runs: Path = Path("runs/algorithms")
    out: Path = Path("docs/results")
    processes: int = 2


def tiny(plan: Plan) -> Plan:
    """Everything once, as small as it gets."""
    digits = {"source": "digits", "limit": 400, "image_size": 16, "validation": 0.3}
    return replace(
        plan, cifar10=digits, cifar100=digits, nano="tiny", resnet="resnet18:width=4,norm=group", seeds=(1, 2),
        rounds=2, classes=(5,), shards=(2,), rates=(0.01,), similarities=("cka_linear", "label_histogram"),
        attacks=("scaling", "backdoor_boosted"), rules=("mean", "median"), clients=10, probe=64,
    )  # fmt: skip


# ---- alignment -------------------------------------------------------------------------------------------------------

ALIGN = {
    "FedAvg": {"name": "fedavg"},
    "FedAlignAvg": {"name": "fedalign"},
    "random weights": {"name": "fedalign", "align": "random"},
}


def align_base(plan: Plan) -> Config:
    """10 clients a round train the whole trunk; the head comes from step 0 and stays."""
    probe = {"probe": plan.probe, "keep": min(20, plan.probe // 10), "top": min(20, plan.probe // 10)}
    return validate(
        {
            "name": "align", "data": plan.cifar100, "model": {"name": plan.nano, "head": "probe"},
            "partition": {"kind": "classes", "clients": plan.clients}, "moves": {"kind": "body"},
            "local": {"steps": 4, "batch_size": 32}, "schedule": {"kind": "cosine"}, "algorithm": probe,
            "rounds": {"total": plan.rounds, "fraction": 10 / plan.clients, "evaluate_every": max(1, plan.rounds // 5)},
        }
    )  # fmt: skip


def align_study(plan: Plan) -> str:
    """The learning rate is FedAvg's best, chosen with another seed: the methods differ only in their weights."""
    base = {n: vary(align_base(plan), partition__classes_per_client=n) for n in plan.classes}
    tries = {f"{n}/{r}": vary(c, seed=TUNING_SEED, local__lr=r) for n, c in base.items() for r in plan.rates}
    best = best_rates(tries, plan)
    runs = {
        f"{n}/{name}/{seed}": vary(c, seed=seed, local__lr=best[str(n)], algorithm=options)
        for n, c in base.items() for name, options in ALIGN.items() for seed in plan.seeds
    }  # fmt: skip
    results = run_many(runs, plan.runs, plan.processes)
    parts, lines = [], {}
    for n in plan.classes:
        scores = {m: [100 * results[f"{n}/{m}/{s}"]["test"]["accuracy"] for s in plan.seeds] for m in ALIGN}
        last = {m: [_last(folder_of(runs[f"{n}/{m}/{s}"], plan.runs)) for s in plan.seeds] for m in ALIGN}
        parts.append(
            f"### N_c = {n}, learning rate {best[str(n)]}\n\n{against(scores, 'FedAvg', 'test (%)')}\n\n"
            f"After the last round, whether or not it was the best:\n\n{against(last, 'FedAvg', 'validation (%)')}\n"
        )
        lines[n] = last
    series = over({m: {n: lines[n][m] for n in plan.classes} for m in ALIGN})
    texts = {"title": "Alignment weights by classes per client", "ylabel": "validation accuracy (%)"}
    figures.draw("F19", plan.out / "algorithms-align.png", series, **texts)
    shown = folder_of(runs[f"{plan.classes[-1]}/FedAlignAvg/{plan.seeds[0]}"], plan.runs)
    for name in ("svcca_layers", "svcca_clients", "drift"):
        shutil.copy(shown / "figures" / f"{name}.png", plan.out / f"algorithms-{name}.png")
    return "\n".join(parts)


def _last(folder: Path) -> float:
    return 100 * curve(folder)[1][-1]


# ---- one body per client ---------------------------------------------------------------------------------------------


def personal_base(plan: Plan) -> Config:
    """Ten clients, all of them every round; only the body moves; each is tested on images of its own classes."""
    return validate(
        {
            "name": "personal", "data": plan.cifar10, "model": {"name": plan.resnet, "head": "random"},
            "partition": {"kind": "shards", "clients": 10}, "moves": {"kind": "body"},
            "local": {"steps": 10, "batch_size": 50, "momentum": 0.9}, "algorithm": {"probe": plan.probe},
            "rounds": {"total": plan.rounds, "fraction": 1.0, "evaluate_every": 0, "checkpoint_every": plan.rounds},
            "personal": {"evaluate": "end", "finetune_epochs": 1, "finetune_lr": 0.01},
        }
    )  # fmt: skip


def personal_methods(plan: Plan, constants: Mapping[str, float]) -> dict[str, dict[str, Any]]:
    """FedBABU, local training, each similarity, and beside it the constant that is as large on average."""
    made: dict[str, dict[str, Any]] = {"FedBABU": {"name": "fedbabu"}, "local only": {"name": "local_only"}}
    for similarity in plan.similarities:
        made[similarity] = {"name": "fedshibu", "similarity": similarity}
        made[matched(similarity)] = {"name": "fedshibu", "similarity": "constant", "constant": constants[similarity]}
    return made


def matched(similarity: str) -> str:
    """The name of a similarity's control."""
    return f"constant like {similarity}"


def mean_similarity(folder: Path) -> float:
    """The mean similarity of two clients in the last round of a run: W_ij / W_ii, the clients being of equal size."""
    last = sorted((folder / "figures").glob("crsm-round-*.safetensors"))[-1]
    mixing = safetensors.torch.load(last.read_bytes())["mixing"].double()
    ratio = mixing / mixing.diagonal()[:, None]
    m = len(ratio)
    return min(1.0, float((ratio.sum() - m) / (m * (m - 1))))


def personal_study(plan: Plan) -> str:
    """The size of each constant, and FedBABU's best learning rate, are found with another seed."""
    base = {s: vary(personal_base(plan), partition__shards_per_client=s) for s in plan.shards}
    tries = {
        f"{s}/{r}": vary(c, seed=TUNING_SEED, local__lr=r, algorithm={"name": "fedbabu"})
        for s, c in base.items() for r in plan.rates
    }  # fmt: skip
    best = best_rates(tries, plan)
    base = {s: vary(c, local__lr=best[str(s)]) for s, c in base.items()}
    sizing = {
        f"{s}/{k}": vary(c, seed=TUNING_SEED, algorithm={"name": "fedshibu", "similarity": k})
        for s, c in base.items() for k in plan.similarities
    }  # fmt: skip
    run_many(sizing, plan.runs, plan.processes)
    constants = {label: mean_similarity(folder_of(config, plan.runs)) for label, config in sizing.items()}
    methods = {s: personal_methods(plan, {k: constants[f"{s}/{k}"] for k in plan.similarities}) for s in plan.shards}
    runs = {
        f"{s}/{name}/{seed}": vary(base[s], seed=seed, algorithm=options)
        for s in plan.shards for name, options in methods[s].items() for seed in plan.seeds
    }  # fmt: skip
    results = run_many(runs, plan.runs, plan.processes)
    parts, lines = [], {}
    for s in plan.shards:
        before, after = (_personal(results, s, methods[s], plan, key) for key in ("mean", "finetuned_mean"))
        sizes = ", ".join(f"{k} {constants[f'{s}/{k}']:.3f}" for k in plan.similarities)
        parts.append(
            f"### s = {s}, learning rate {best[str(s)]}\n\nMean similarity of two clients: {sizes}.\n\n"
            f"Before fine-tuning:\n\n{against(before, 'FedBABU', 'mean client accuracy (%)')}\n\n"
            f"After fine-tuning:\n\n{against(after, 'FedBABU', 'mean client accuracy (%)')}\n\n"
            f"{verdict(after, plan.similarities)}\n"
        )
        lines[s] = before
    shown = ("FedBABU", "local only", *plan.similarities)
    figures.draw(
        "F28", plan.out / "algorithms-shards.png", over({m: {s: lines[s][m] for s in plan.shards} for m in shown})
    )
    folder = folder_of(runs[f"{plan.shards[0]}/{plan.similarities[0]}/{plan.seeds[0]}"], plan.runs)
    shutil.copy(folder / "figures" / "mixing.png", plan.out / "algorithms-mixing.png")
    return "\n".join(parts)


def _personal(results: Results, s: int, methods: Mapping[str, Any], plan: Plan, key: str) -> dict[str, list[float]]:
    return {m: [100 * results[f"{s}/{m}/{seed}"]["personal"][key] for seed in plan.seeds] for m in methods}


def verdict(scores: Mapping[str, list[float]], similarities: Sequence[str]) -> str:
    """Each similarity against a constant of its size: what is left is what similarity itself is worth."""
    gaps = {k: [a - b for a, b in zip(scores[k], scores[matched(k)], strict=True)] for k in similarities}
    rows = []
    for gap in paired([0.0] * len(gaps[similarities[0]]), gaps):  # all of them at once, so that p is corrected
        d = gap.difference
        said = "no difference to be seen" if gap.p >= 0.05 else "more" if d.mean > 0 else "less"
        rows.append([gap.name, f"{d.mean:+.2f} [{d.low:+.2f}, {d.high:+.2f}]", f"{gap.p:.3f}", said])
    return table(["similarity", "minus the constant of its size, 95 % interval", "p (Holm)", "so it gives"], rows)


# ---- groups and attacks ----------------------------------------------------------------------------------------------

GROUPS = {
    "all together": {"name": "fedbabu"},
    "within groups": {"name": "fedshibu", "similarity": "groups"},
    "local only": {"name": "local_only"},
}


def groups_study(plan: Plan) -> str:
    """Clients 0-4 hold classes 0-4, the others classes 5-9: one extractor for all, one per group, or one each."""
    every = max(1, plan.rounds // 6)
    base = vary(
        personal_base(plan), name="groups", partition__kind="groups",
        partition__groups=[[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]],
        personal={"evaluate": "always", "finetune_epochs": 0}, rounds__evaluate_every=every,
        local__lr=plan.rates[len(plan.rates) // 2],
    )  # fmt: skip
    runs = {f"{m}/{s}": vary(base, seed=s, algorithm=o) for m, o in GROUPS.items() for s in plan.seeds}
    results = run_many(runs, plan.runs, plan.processes)
    scores = {m: [100 * results[f"{m}/{s}"]["personal"]["mean"] for s in plan.seeds] for m in GROUPS}
    series = {}
    for method in GROUPS:
        found = [curve(folder_of(runs[f"{method}/{s}"], plan.runs), "personal") for s in plan.seeds]
        stats = [summarise([100 * ys[i]["mean"] for _, ys in found]) for i in range(len(found[0][0]))]  # type: ignore[index]
        series[method] = (found[0][0], [s.mean for s in stats], [s.std for s in stats])
    figures.draw("F25", plan.out / "algorithms-groups.png", series)
    return against(scores, "all together", "mean client accuracy (%)")


def attack_study(plan: Plan) -> str:
    """15 clients, all of them every round, three lying: the smallest cohort in which Bulyan keeps its promise."""
    base = validate(
        {
            "name": "attack", "data": plan.cifar100, "model": {"name": plan.nano}, "moves": {"kind": "head"},
            "partition": {"clients": 15}, "local": {"steps": 4, "batch_size": 64, "lr": plan.rates[-1]},
            "rounds": {"total": plan.rounds, "fraction": 1.0},
        }
    )  # fmt: skip
    cells: dict[int, list[Cell]] = {
        seed: attack_table(vary(base, seed=seed), plan.attacks, plan.rules, 0.2, ("stratified", "dirichlet:0.5"))
        for seed in plan.seeds
    }
    for seed, found in cells.items():
        write_cells(found, plan.out / f"algorithms-attack-{seed}", f"Seed {seed}.")
    parts = []
    for partition in ("stratified", "dirichlet:0.5"):
        rows = [_attack_row(cells, partition, rule, plan) for rule in plan.rules]
        header = ["rule", "honest (%)", "worst drop (points)", "by", "backdoor, honest (%)", "backdoor, worst (%)"]
        parts.append(f"### {partition}\n\n{table(header, rows)}\n")
    return "\n".join(parts)


def _attack_row(cells: Mapping[int, list[Cell]], partition: str, rule: str, plan: Plan) -> list[object]:
    """Means over seeds; the worst attack is the one with the largest mean drop."""

    def values(attack: str, field: str) -> dict[int, float]:
        named = {(s, c.partition, c.rule, c.attack): getattr(c, field) for s, found in cells.items() for c in found}
        mine = {seed: named[seed, partition, rule, attack] for seed in cells}
        return {seed: 100 * value for seed, value in mine.items() if value is not None}

    honest = values(HONEST, "accuracy")
    under = {attack: values(attack, "accuracy") for attack in plan.attacks}
    if not honest or any(found.keys() != honest.keys() for found in under.values()):
        return [rule, "–", "–", "–", "–", "–"]  # a cell that could not run may have been the worst
    drops = {attack: [honest[seed] - found[seed] for seed in honest] for attack, found in under.items()}
    worst = max(drops, key=lambda attack: summarise(drops[attack]).mean)
    doors = [summarise(list(values(a, "backdoor").values())) for a in plan.attacks if "backdoor" in a]
    plain = summarise(list(values(HONEST, "backdoor").values()))
    door = max(doors, key=lambda s: s.mean, default="–")
    return [rule, summarise(list(honest.values())), summarise(drops[worst]), worst, plain, door]


# ---- tables and the page ---------------------------------------------------------------------------------------------


def best_rates(tries: Mapping[str, Config], plan: Plan) -> dict[str, float]:
    """By setting the learning rate that is best on validation after the last round; labels are `setting/rate`.

    The best round would not do: where training harms, that is the start, whatever the rate. Nor would test images.
    """
    run_many(tries, plan.runs, plan.processes)
    best: dict[str, tuple[float, float]] = {}
    for label, config in tries.items():
        setting, rate = label.split("/")
        best[setting] = max(best.get(setting, (-1.0, 0.0)), (_last(folder_of(config, plan.runs)), float(rate)))
    return {setting: rate for setting, (_, rate) in best.items()}


def against(scores: Mapping[str, list[float]], base: str, what: str) -> str:
    """Mean and spread of each method, and its difference to the base on the same seeds."""
    gaps = {d.name: d for d in paired(scores[base], {m: v for m, v in scores.items() if m != base})}
    rows = []
    for method, values in scores.items():
        d = gaps[method].difference if method in gaps else None
        gap = "" if d is None else f"{d.mean:+.2f} [{d.low:+.2f}, {d.high:+.2f}]"
        rows.append([method, summarise(values), gap, f"{gaps[method].p:.3f}" if method in gaps else ""])
    return table(["method", what, f"minus {base}, 95 % interval", "p (Holm)"], rows)


def over(scores: Mapping[str, Mapping[int, list[float]]]) -> dict[str, tuple[list[int], list[float], list[float]]]:
    """Lines over a setting with a band of one standard deviation."""
    made = {}
    for method, by in scores.items():
        stats = [summarise(values) for values in by.values()]
        made[method] = (list(by), [s.mean for s in stats], [s.std for s in stats])
    return made


STUDIES = {"align": align_study, "personal": personal_study, "groups": groups_study, "attack": attack_study}


def main() -> None:
    """Run the studies and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cifar10", help="file or folder; else the usual places")
    parser.add_argument("--cifar100", help="file or folder; else the usual places")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--limit", type=int, help="use so many training images")
    parser.add_argument("--studies", default=",".join(STUDIES))
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--runs", type=Path, default=Path("runs/algorithms"))
    parser.add_argument("--out", type=Path, default=Path("docs/results"))
    parser.add_argument("--tiny", action="store_true", help="digits and a drawn network: does every step work?")
    options = parser.parse_args()
    ten, hundred = ({"source": s, "path": getattr(options, s), "limit": options.limit} for s in ("cifar10", "cifar100"))
    plan = Plan(ten, hundred, rounds=options.rounds, runs=options.runs, out=options.out, processes=options.processes)
    plan = tiny(plan) if options.tiny else plan
    plan.out.mkdir(parents=True, exist_ok=True)
    parts = {name: STUDIES[name](plan) for name in options.studies.split(",")}
    texts = {name: parts.get(name, "Not run.") for name in STUDIES}
    notice = "\n**A trial on digits with a drawn network: these numbers mean nothing.**\n" if options.tiny else ""
    facts = {"rounds": plan.rounds, "seeds": len(plan.seeds), "attacks": len(plan.attacks), "notice": notice}
    facts["rates"] = ", ".join(map(str, plan.rates))
    (plan.out / "algorithms.md").write_text(PAGE.format(**facts, **texts))


PAGE = """# Algorithms: similarity, alignment and liars

Command: `python recipes/results_algorithms.py --cifar10 FILE --cifar100 FILE --rounds {rounds}`. {seeds} seeds; mean ±
standard deviation; differences are paired by seed with Student's 95 % interval, p-values corrected by Holm within a
table, not over the page. With so few seeds intervals are wide: "no difference to be seen" does not mean that there is
none. In the first two studies the learning rate is the best of {rates} by validation after the last round, with seed 0,
which is not used below; it is chosen for the baseline (FedAvg, FedBABU) and used for all, so the others may have a
better one. Groups and liars use one rate that was not tuned.
{notice}
## Does alignment weighting help?

FedAvg, FedAlignAvg (the client computes its score) and the control: the same weights dealt to other clients at
random. CIFAR-100, `nano`, the whole trunk trains, the head comes from step 0. The tested model is the best by
validation, the start included.

{align}

![by classes](algorithms-align.png) ![SVCCA by layer](algorithms-svcca_layers.png)
![SVCCA by client](algorithms-svcca_clients.png) ![drift](algorithms-drift.png)

## Does representation similarity help, or is it self-weighting?

One body per client, mixed by similarity. A similarity also decides how much a client listens to the others at all; the
control has one constant for all pairs, as large as that similarity is on average. What is left between the two is what
knowing *who* is similar is worth. CIFAR-10, ResNet-18 of width 16, ten clients with s shards each.

{personal}

![over shards](algorithms-shards.png) ![mixing](algorithms-mixing.png)

## Groups with separate classes

{groups}

![groups](algorithms-groups.png)

## Liars

15 clients, three of them lying (20 %), the head on `nano`. The worst drop is the largest mean loss of accuracy over
{attacks} attacks, against the same rule without liars; being the largest of so many, it holds some noise as well.
Backdoor success is the share of stamped images of other classes
that become the target, reported apart because an attack can have one without the other.

{attack}
"""

if __name__ == "__main__":
    main()
