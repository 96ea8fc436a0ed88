"""Experiments that need more than a grid: controls of a matched size, the attack table, tables without runs.

`WHOLE` studies carry out everything; the others change the cells of a grid once its learning rates are known.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from fedgraft.config.load import merge
from fedgraft.errors import FedgraftError
from fedgraft.report.statistics import gap_cells, paired, summarise
from fedgraft.runs.files import write_text
from fedgraft.runs.sweep import vary
from reproduction.preset import Cell, cells
from reproduction.reproduce import TUNING_SEED, Found, Tables, Work, carry_out

LIKE = "constant like "
"""Levels of this name are controls: one constant for all pairs, as large as that similarity is on average."""
_LIARS = 0.2
_PARTITIONS = ("stratified", "dirichlet:0.5")
_DOOR = "backdoor success, the better of two (%)"
_TINY = {"attacks": ("scaling", "backdoor_boosted"), "rules": ("mean", "median")}


def matched(work: Work, every: Sequence[Cell], rates: Mapping[str, float]) -> list[Cell]:
    """Give each control the mean similarity that its namesake shows with the tuning seed."""
    by = {cell.label: cell for cell in every}
    namesake = _namesakes(every)
    sizing = {}
    for label in dict.fromkeys(namesake.values()):
        config = by[label].config(seed=TUNING_SEED)
        sizing[label] = (vary(config, local__lr=rates[label]) if label in rates else config, False)
    sizes = {label: mean_similarity(folder) for label, folder in carry_out(work, sizing).items()}
    made = []
    for cell in every:
        if cell.label in namesake:
            size = {"algorithm": {"constant": sizes[namesake[cell.label]]}}
            cell = Cell(levels=cell.levels, table=merge(cell.table, size), central=cell.central)
        made.append(cell)
    return made


def _namesakes(every: Sequence[Cell]) -> dict[str, str]:
    """By the label of a control the label of the similarity whose size it has."""
    return {c.label: "/".join([*c.levels[:-1], c.levels[-1].removeprefix(LIKE)]) for c in every if LIKE in c.label}


def against_controls(found: Found) -> Tables:
    """Each similarity minus the constant of its size, paired by seed; nothing where there is no such control."""
    gaps: dict[str, list[float]] = {}
    for control, namesake in _namesakes(found.cells).items():
        ours, theirs = (found.measured(label, found.work.preset.measure) for label in (namesake, control))
        if ours and theirs:
            gaps[namesake] = [a - b for a, b in zip(ours, theirs, strict=True)]
    if not gaps:
        return {}
    what = f"{found.title(found.work.preset.measure)}, minus the constant"
    tested = paired([0.0] * len(found.work.seeds), gaps)
    rows = [{"setting": gap.name, **gap_cells(what, gap)} for gap in tested]
    return {"Similarity against a constant of its size": ("", rows)}


def mean_similarity(folder: Path) -> float:
    """The mean similarity of two clients in the last round of a run: W_ij / W_ii, the clients being of equal size."""
    import safetensors.torch

    last = sorted((folder / "figures").glob("crsm-round-*.safetensors"))[-1]
    mixing = safetensors.torch.load(last.read_bytes())["mixing"].double()
    ratio = mixing / mixing.diagonal()[:, None]
    m = len(ratio)
    return round(min(1.0, float((ratio.sum() - m) / (m * (m - 1)))), 6)


def attack(work: Work) -> Found:
    """Every rule honestly and under every attack; a finished table is kept beside the runs and read again."""
    from fedgraft.engines.attackers import NAMES
    from fedgraft.runs.attack import RULES

    attacks, rules = (_TINY["attacks"], _TINY["rules"]) if work.scale == "tiny" else (NAMES, RULES)
    start = cells(work.preset, work.scale, work.name, work.data)
    kept = [rule for rule in rules if any(cell.levels[-1] == rule for cell in start)]
    minutes = work.preset.scales[work.scale].core_minutes * len(work.seeds) / 3  # type: ignore[index]
    work.report(
        f"{work.name}: {len(work.seeds)} tables of {2 * len(kept) * (1 + len(attacks))} cells, {minutes:.0f} min"
    )
    found = [_attack_cells(work, start[0], seed, attacks, kept) for seed in work.seeds]
    values: dict[str, dict[str, list[float]]] = {}
    by_attack: dict[str, dict[str, list[float]]] = {}
    for cell in start:
        partition = {"IID": _PARTITIONS[0], "Dirichlet 0.5": _PARTITIONS[1]}[cell.levels[0]]
        mine = [
            {c["attack"]: c for c in one if (c["partition"], c["rule"]) == (partition, cell.levels[-1])}
            for one in found
        ]
        if mine and all(c["accuracy"] for one in mine for c in one.values()):
            by_attack[cell.label] = {name: _percent(mine, name, "accuracy") for name in ("honest", *attacks)}
            values[cell.label] = _attack_values(mine, attacks)
    titles = {"test": "test, nobody lies (%)", "last": "test under the worst attack (%)", "best": _DOOR}
    return Found(work, start, values=values, extra=_attack_tables(values, by_attack), titles=titles)


def _attack_cells(
    work: Work, cell: Cell, seed: int, attacks: Sequence[str], rules: Sequence[str]
) -> list[dict[str, str]]:
    from fedgraft.runs.attack import attack_table

    config = cell.config(seed=seed)
    key = hashlib.blake2b(repr((config.digest, tuple(attacks), tuple(rules))).encode(), digest_size=8).hexdigest()
    path = work.runs / f"attack-{key}.json"
    if not path.is_file():
        made = attack_table(config, attacks, rules, _LIARS, _PARTITIONS, work.report)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps([asdict(one) for one in made]))
    return list(json.loads(path.read_text()))


def _attack_values(
    mine: Sequence[Mapping[str, Mapping[str, object]]], attacks: Sequence[str]
) -> dict[str, list[float]]:
    """Accuracy without liars, the accuracy under the worst attack (by its mean), and the backdoor's success."""

    worst = _worst({name: _percent(mine, name, "accuracy") for name in attacks})
    doors = [_percent(mine, name, "backdoor") for name in attacks if "backdoor" in name]
    return {
        "test": _percent(mine, "honest", "accuracy"), "last": _percent(mine, worst, "accuracy"),
        "best": max(doors, key=lambda v: summarise(v).mean) if doors else _percent(mine, "honest", "backdoor"),
    }  # fmt: skip


def _worst(accuracies: Mapping[str, list[float]]) -> str:
    """The attack that leaves the least, by its mean over seeds."""
    return min(accuracies, key=lambda name: summarise(accuracies[name]).mean)


def _percent(mine: Sequence[Mapping[str, Mapping[str, object]]], name: str, key: str) -> list[float]:
    """One number of one attack, by seed."""
    return [100 * float(str(one[name][key])) for one in mine]


def _attack_tables(
    values: Mapping[str, Mapping[str, list[float]]], by_attack: Mapping[str, Mapping[str, list[float]]]
) -> Tables:
    """The worst drop and the backdoor by rule, then every attack."""
    worst = []
    for label, v in values.items():
        drops = [a - b for a, b in zip(v["test"], v["last"], strict=True)]
        which = _worst({name: found for name, found in by_attack[label].items() if name != "honest"})
        lost = {"points lost under the worst attack": str(summarise(drops)), "which": which}
        worst.append({"deal and rule": label, **lost, _DOOR: str(summarise(v["best"]))})
    each = [
        {"deal and rule": label, **{name: f"{summarise(found).mean:.1f}" for name, found in v.items()}}
        for label, v in by_attack.items()
    ]
    said = "20 % of the clients lie; one run for each cell and seed, measured after the last round: nothing is chosen."
    return {"Liars": (said, worst), "Every attack": ("Test accuracy (%), mean over seeds.", each)}


def settings(work: Work) -> Found:
    """Tables of settings and schematics: there is nothing to run."""
    return Found(work, [])


Adjust = Callable[[Work, Sequence[Cell], Mapping[str, float]], list[Cell]]
WHOLE: dict[str, Callable[[Work], Found]] = {"attack": attack, "settings": settings}
_ADJUST: dict[str, Adjust] = {"matched": matched}


def named(name: str) -> Adjust:
    """A study that changes cells, by its name."""
    if name not in _ADJUST:
        raise FedgraftError(f"there is no study {name!r}; there are: {', '.join([*_ADJUST, *WHOLE])}.")
    return _ADJUST[name]
