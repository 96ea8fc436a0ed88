"""Experiments that need more than a grid: controls of a matched size, the attack table, tables without runs.

`WHOLE` studies carry out everything; the others change the cells of a grid once its learning rates are known.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedgraft.config.load import merge
from fedgraft.core.errors import FedgraftError
from fedgraft.metrics.statistics import summarise
from reproduction.preset import Cell
from reproduction.reproduce import TUNING_SEED, Found, Tables, Work, carry_out, numbers
from reproduction.runs import finished_attacks, vary_config
from reproduction.statistics import paired

if TYPE_CHECKING:
    from fedgraft.consortium.attack import Known

LIKE = "constant like "
"""Levels with these words are controls: one constant for all pairs, as large as that similarity is on average."""
_ATTACKERS = 0.2
_PARTITIONS = {"IID": "stratified", "Dirichlet 0.5": "dirichlet:0.5"}
_DOOR = "backdoor success, the better of two (%)"
_SAID = (
    "20 % of the clients attack; one run for each cell and seed, measured after the last round. Which attack is the "
    "worst is chosen with seed 0, which is not measured."
)
_TINY = {"attacks": ("scaling", "backdoor_boosted"), "rules": ("mean", "median")}


def matched(work: Work, every: Sequence[Cell], rates: Mapping[str, float]) -> list[Cell]:
    """Give each control the mean similarity that its namesake shows with the tuning seed."""
    by = {cell.label: cell for cell in every}
    namesake = _namesakes(every)
    sizing = {}
    for label in dict.fromkeys(namesake.values()):
        config = by[label].config(seed=TUNING_SEED)
        sizing[label] = (vary_config(config, local__lr=rates[label]) if label in rates else config, False)
    sizes = {label: mean_similarity(folder) for label, folder in carry_out(work, sizing).items()}
    made = []
    for cell in every:
        if cell.label in namesake:
            if namesake[cell.label] not in sizes:  # its run failed, or is not there yet
                continue
            size = {"algorithm": {"constant": sizes[namesake[cell.label]]}}
            cell = Cell(levels=cell.levels, table=merge(cell.table, size), central=cell.central)
        made.append(cell)
    return made


def _namesakes(every: Sequence[Cell]) -> dict[str, str]:
    """By the label of a control the label of the similarity whose size it has."""
    return {c.label: "/".join([*c.levels[:-1], c.levels[-1].replace(LIKE, "")]) for c in every if LIKE in c.label}


def against_controls(found: Found) -> Tables:
    """Each similarity minus the constant of its size, paired by seed; nothing where there is no such control."""
    measure, rows = found.work.preset.measure, []
    for control, namesake in _namesakes(found.cells).items():
        effect = paired(found.measured(namesake, measure), found.measured(control, measure))
        if effect is not None:
            rows.append({"setting": namesake, f"{found.title(measure)}, minus the constant": str(effect)})
    return {"Similarity against a constant of its size": ("", rows)} if rows else {}


def shares_kept(found: Found) -> Tables:
    """Each arm's number over the one it has at `relative_to`, paired by seed; nothing where the preset has no such."""
    preset = found.work.preset
    if not preset.relative_to:
        return {}
    rows = []
    for cell in found.cells:
        first, *rest = cell.levels
        whole = found.measured("/".join([preset.relative_to, *rest]), preset.measure)
        share = paired(found.measured(cell.label, preset.measure), whole, ratio=True)
        if first != preset.relative_to and share is not None:
            rows.append({"setting": cell.label, f"{found.title(preset.measure)} over {preset.relative_to}": str(share)})
    return {f"What is kept of {preset.relative_to}": ("Ratios, geometric means over seeds.", rows)} if rows else {}


def mean_similarity(folder: Path) -> float:
    """The mean similarity of two clients in the last round of a run: W_ij / W_ii, the clients being of equal size."""
    import safetensors.torch

    last = sorted((folder / "figures").glob("crsm-round-*.safetensors"))[-1]
    mixing = safetensors.torch.load(last.read_bytes())["mixing"].double()
    ratio = mixing / mixing.diagonal()[:, None]
    m = len(ratio)
    return round(min(1.0, float((ratio.sum() - m) / (m * (m - 1)))), 6)


def attack(work: Work) -> Found:
    """Every rule with benign clients and under every attack; a finished table is kept beside the runs and read again.

    The worst attack on a rule is chosen with the tuning seed and measured with the others: the least of several means
    over the same seeds would be too low.
    """
    from fedgraft.consortium.attack import RULES
    from fedgraft.engines.attackers import NAMES

    attacks, rules = (_TINY["attacks"], _TINY["rules"]) if work.scale == "tiny" else (NAMES, RULES)
    start = work.cells
    kept = [rule for rule in rules if any(cell.levels[-1] == rule for cell in start)]
    seeds = (TUNING_SEED, *work.seeds)
    count, minutes = 2 * len(kept) * (1 + len(attacks)), work.preset.scales[work.scale].core_minutes  # type: ignore[index]
    if not work.read:
        work.report(f"{work.name}: {len(seeds)} tables of {count} cells, {minutes:.0f} core-minutes")
    known = finished_attacks(work.runs)
    found = {seed: _attack_cells(work, start[0], seed, (attacks, kept), known) for seed in seeds}
    values: dict[str, dict[str, dict[int, float]]] = {}
    rows: dict[str, list[dict[str, Any]]] = {"worst": [], "each": []}
    for cell in start:
        mine = {seed: _of_cell(cell, table) for seed, table in found.items()}
        if all(one["accuracy"] for table in mine.values() for one in table.values()):
            values[cell.label] = _attack_values(mine, attacks, rows, cell.label)
    extra = {"Attackers": (_SAID, rows["worst"]), "Every attack": ("Test accuracy (%), mean over seeds.", rows["each"])}
    titles = {"test": "test, nobody attacks (%)", "last": "test under the worst attack (%)", "best": _DOOR}
    return Found(work, start, values=values, extra=extra, titles=titles)


def _of_cell(cell: Cell, table: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """The rows of one partition and rule, by attack."""
    partition = _PARTITIONS[cell.levels[0]]
    return {one["attack"]: one for one in table if (one["partition"], one["rule"]) == (partition, cell.levels[-1])}


def _attack_cells(
    work: Work,
    cell: Cell,
    seed: int,
    wanted: tuple[Sequence[str], Sequence[str]],
    known: Known,
) -> list[dict[str, Any]]:
    from fedgraft.consortium.attack import AttackPlan, attack_table, outcomes

    (attacks, rules), config = wanted, cell.config(seed=seed)
    key = hashlib.blake2b(repr((config.digest, tuple(attacks), tuple(rules))).encode(), digest_size=8).hexdigest()
    plan = AttackPlan(config, attacks, rules, _ATTACKERS, tuple(_PARTITIONS.values()), (seed,))
    root = work.runs / f"attack-{key}"
    if work.read:
        return [asdict(one) for one in outcomes(plan.cells(root, known))]
    return [asdict(one) for one in attack_table(plan, root, work.report, known)]


def _attack_values(
    mine: Mapping[int, Mapping[str, Mapping[str, Any]]],
    attacks: Sequence[str],
    rows: dict[str, list[dict[str, Any]]],
    label: str,
) -> dict[str, dict[int, float]]:
    """By seed the accuracy with benign clients, under the worst attack, and the backdoor's success."""
    from fedgraft.consortium.attacked import BENIGN

    def percent(name: str, key: str) -> dict[int, float]:
        return {seed: 100 * float(table[name][key]) for seed, table in mine.items() if seed != TUNING_SEED}

    chosen = mine[TUNING_SEED]
    worst = min(attacks, key=lambda name: float(chosen[name]["accuracy"]))
    doors = [name for name in attacks if "backdoor" in name]
    door = max(doors, key=lambda name: float(chosen[name]["backdoor"])) if doors else BENIGN
    values = {
        "test": percent(BENIGN, "accuracy"),
        "last": percent(worst, "accuracy"),
        "best": percent(door, "backdoor"),
    }
    lost = str(paired(values["test"], values["last"]))
    rows["worst"].append(
        {
            "partition and rule": label,
            "points lost": lost,
            "under": worst,
            _DOOR: str(summarise(numbers(values["best"]))),
        }
    )
    means = {name: f"{summarise(numbers(percent(name, 'accuracy'))).mean:.1f}" for name in (BENIGN, *attacks)}
    rows["each"].append({"partition and rule": label, **means})
    return values


def settings(work: Work) -> Found:
    """Tables of settings and schematics: there is nothing to run."""
    return Found(work, [])


Adjust = Callable[[Work, Sequence[Cell], Mapping[str, float]], list[Cell]]


def known(work: Work) -> Found:
    """Models per client, fine-tuned at a rate of each arm's own, and what their mixtures know of shared classes."""
    from reproduction.known import known as carry_out_known

    return carry_out_known(work)


WHOLE: dict[str, Callable[[Work], Found]] = {"attack": attack, "settings": settings, "known": known}
_ADJUST: dict[str, Adjust] = {"matched": matched}


def named(name: str) -> Adjust:
    """A study that changes cells, by its name."""
    if name not in _ADJUST:
        raise FedgraftError(
            "E-REPRODUCTION-STUDY",
            f"there is no study {name!r}",
            f"there are: {', '.join([*_ADJUST, *WHOLE])}",
            study=name,
        )
    return _ADJUST[name]
