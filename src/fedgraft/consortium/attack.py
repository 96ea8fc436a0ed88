"""The attack table: a sweep over aggregation rules times attacks with the same attackers; accuracy and backdoor rate.

Every cell is a run; each rule is also run without an attack, and the harm of an attack is the drop from there. The runs
follow each other in this process: starting processes would cost more than two at a time could save, and large runs use
`workers`.
"""

from __future__ import annotations

import itertools
import json
import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean

from fedgraft.aggregate.robust import AGGREGATORS
from fedgraft.config.build import per_round
from fedgraft.config.load import Config
from fedgraft.consortium.attacked import BENIGN, OUTCOME, run_attacked
from fedgraft.consortium.search_tables import as_csv, format_spread
from fedgraft.consortium.sweep import Cell, Report, finished_summary, folder_of, run_cells, vary_config
from fedgraft.core.errors import FedgraftError
from fedgraft.core.store import write_text
from fedgraft.engines.attackers import DATA_ATTACKS, NAMES, choose_attackers
from fedgraft.engines.attacks import unknown_attack
from fedgraft.metrics.statistics import markdown_table
from fedgraft.report.html import write_tables

RULES = (*AGGREGATORS, "nnm+median", "nnm+trimmed_mean")
"""Aggregation rules by name; the prefix `nnm+` means nearest-neighbour mixing first."""
_NUMBERS = {
    "classes": "classes_per_client",
    "shards": "shards_per_client",
    "dirichlet": "alpha",
    "dirichlet_balanced": "alpha",
}
"""The option that the number behind a partition's name sets."""
_MISSING = "–"


Known = Mapping[tuple[str, str], Path]
"""Folders of earlier runs, by (attack and share of attackers as "alie-0.2", digest of the config)."""


@dataclass(frozen=True)
class AttackResult:
    """One run: aggregation rule, attack, and the measured fractions (None if it could not run)."""

    partition: str
    rule: str
    attack: str
    seed: int
    accuracy: float | None = None
    backdoor: float | None = None
    """Share of test images of other classes that the trigger turns into the target; None without images."""
    note: str = ""

    @property
    def label(self) -> str:
        """The name of the run."""
        return f"{self.partition} / {self.rule} / {self.attack} / seed {self.seed}"


@dataclass(frozen=True)
class AttackPlan:
    """A table of attacked runs: each rule without and under each attack, for each partition and seed.

    `share` of the clients attack. A partition is written `kind` or `kind:number`; empty partitions and seeds mean the
    config's own.
    """

    config: Config
    attacks: Sequence[str]
    rules: Sequence[str]
    share: float = 0.2
    partitions: Sequence[str] = ()
    seeds: Sequence[int] = ()

    def __post_init__(self) -> None:
        for name in self.attacks:
            if name not in NAMES:
                raise unknown_attack(name, NAMES)
        for name in self.rules:
            if name not in RULES:
                raise FedgraftError(
                    "E-CONSORTIUM-RULE",
                    f"there is no aggregation rule {name!r}",
                    f"choose from {', '.join(RULES)}",
                    rule=name,
                )
        for name in self.attacks:
            if self.config.data.source == "features" and "backdoor" in name:
                raise FedgraftError(
                    "E-CONSORTIUM-BACKDOOR-FEATURES",
                    "a backdoor is a pattern of pixels, and data.source='features' has none",
                    "leave the backdoor out",
                    attack=name,
                )
            replaces_updates = DATA_ATTACKS.get(name, name) != ""
            if self.config.privacy.aggregation == "secure" and replaces_updates:
                raise FedgraftError(
                    "E-CONSORTIUM-ATTACK-SECURE",
                    f"{name} replaces updates, and under secure aggregation no single update is visible",
                    "use label_flip or backdoor, or privacy.aggregation='clear'",
                    attack=name,
                )

    def cells(self, root: Path, known: Known | None = None) -> dict[AttackResult, Cell]:
        """Return every run of the table by its result without numbers; nothing is run.

        A run's folder is the one in `known`, or else below `root`.
        """
        combinations = itertools.product(
            self.seeds or [self.config.seed],
            self.partitions or [self.config.partition.kind],
            self.rules,
            [BENIGN, *self.attacks],
        )
        cells: dict[AttackResult, Cell] = {}
        for seed, partition, rule, attack in combinations:
            result = AttackResult(partition, rule, attack, seed)
            config = self._config(partition, rule, seed)
            attack_and_share = f"{attack}-{self.share:g}"
            folder = (known or {}).get((attack_and_share, config.digest))
            if folder is None:
                folder = folder_of(config, root / attack_and_share)
            run = partial(run_attacked, kind=attack, share=self.share)
            cells[result] = Cell(result.label, config, folder, special=run)
        return cells

    def _config(self, partition: str, rule: str, seed: int) -> Config:
        """Return the config of one run.

        It says how many attackers the rule should expect in a cohort, not who they are. `partition` is `kind` or
        `kind:number`, `rule` a name of `RULES`.
        """
        clients = self.config.partition.clients
        attackers = len(choose_attackers(clients, self.share, seed))
        expected = math.ceil(attackers * per_round(self.config) / clients - 1e-9)
        if rule == "mean":
            expected = 0
        mixing, _, name = rule.rpartition("+")
        return vary_config(
            self.config,
            seed=seed,
            partition=partition_of(partition),
            algorithm={"robust": name, "attackers": expected, "neighbours": bool(mixing), "clip_norm": None},
            rounds={"evaluate_every": 0, "test": False},
        )


def partition_of(text: str) -> dict[str, object]:
    """Return a partition written as `stratified` or `dirichlet:0.5` as options of the config's table `partition`."""
    kind, _, number = text.partition(":")
    if not number:
        return {"kind": kind}
    if kind not in _NUMBERS:
        raise FedgraftError(
            "E-CONSORTIUM-PARTITION-NUMBER",
            f"the partition {kind!r} takes no number",
            f"use one of {', '.join(_NUMBERS)}, or leave the number out",
            partition=text,
        )
    try:
        value: float | int = float(number)
        if "dirichlet" not in kind:
            value = int(number)
    except ValueError:
        raise FedgraftError(
            "E-CONSORTIUM-PARTITION-NUMBER",
            f"the partition {text!r} has no number after the colon",
            "write for example dirichlet:0.5",
            partition=text,
        ) from None
    return {"kind": kind, _NUMBERS[kind]: value}


def attack_table(
    plan: AttackPlan, root: Path, report: Report = print, known: Known | None = None
) -> list[AttackResult]:
    """Run every cell of the plan in this process and return the results; finished runs are read.

    A cell that cannot run has a note instead of numbers; if no cell can run, the reason of the first is raised. A run
    that was killed before it was measured is deleted and repeated. Runs are in folders below `root`; `report` prints a
    line, `known` are folders of earlier runs.
    """
    cells = plan.cells(root, known)
    for cell in cells.values():
        if finished_summary(cell.folder) and not (cell.folder / OUTCOME).exists():  # killed before it was measured
            shutil.rmtree(cell.folder)
    summaries, failures = run_cells(list(cells.values()), 0, report)
    if not summaries:
        raise FedgraftError("E-CONSORTIUM-NO-CELL", next(iter(failures.values())))
    results = []
    for result in outcomes(cells):
        note = failures.get(result.label, "")
        results.append(replace(result, note=note))
    return results


def outcomes(cells: Mapping[AttackResult, Cell]) -> list[AttackResult]:
    """Return every cell's result, with the numbers of its run where `attack.json` is there."""
    results = []
    for result, cell in cells.items():
        file = cell.folder / OUTCOME
        if file.exists():
            result = replace(result, **json.loads(file.read_text()))
        results.append(result)
    return results


# ---- tables ----------------------------------------------------------------------------------------------------------


def summary_rows(results: Sequence[AttackResult]) -> dict[str, list[dict[str, str]]]:
    """Return by partition one row per rule: accuracy under each attack, the worst drop, the backdoor rates."""
    by_rule: dict[tuple[str, str], dict[str, list[AttackResult]]] = {}
    for result in results:
        by_attack = by_rule.setdefault((result.partition, result.rule), {})
        by_attack.setdefault(result.attack, []).append(result)
    tables: dict[str, list[dict[str, str]]] = {}
    for (partition, rule), by_attack in by_rule.items():
        tables.setdefault(partition, []).append(_row(rule, by_attack))
    return tables


def _row(rule: str, by_attack: Mapping[str, Sequence[AttackResult]]) -> dict[str, str]:
    """Return one rule's row from its results by attack, one result per seed."""
    accuracy = {}
    backdoor = {}
    for attack, results in by_attack.items():
        accuracy[attack] = _complete([result.accuracy for result in results])
        backdoor[attack] = _complete([result.backdoor for result in results])
    row = {"rule": rule}
    for attack, values in accuracy.items():
        row[f"{attack} (%)"] = format_spread(values) or _MISSING
    row["worst drop"] = _worst_drop(accuracy)
    row["backdoor, benign (%)"] = format_spread(backdoor[BENIGN]) or _MISSING
    backdoor_rates = [values for attack, values in backdoor.items() if "backdoor" in attack and values]
    row["backdoor, worst (%)"] = format_spread(max(backdoor_rates, key=fmean, default=[])) or _MISSING
    return row


def _worst_drop(accuracy: Mapping[str, Sequence[float]]) -> str:
    """Return the largest drop of the mean accuracy from the benign run in points, and its attack."""
    if not all(accuracy.values()):
        return _MISSING  # a missing cell may have been the worst
    benign = fmean(accuracy[BENIGN])
    drops = {}
    for attack, values in accuracy.items():
        if attack != BENIGN:
            drops[attack] = benign - fmean(values)
    if not drops:
        return _MISSING
    worst = max(drops, key=lambda attack: drops[attack])
    return f"{100 * drops[worst]:.1f} ({worst})"


def _complete(values: Sequence[float | None]) -> list[float]:
    """Return the values, or none of them if one is missing."""
    present = [value for value in values if value is not None]
    if len(present) < len(values):
        return []
    return present


def write_attack_table(results: Sequence[AttackResult], out: Path, note: str = "") -> list[Path]:
    """Write the table into the folder `out` as Markdown, CSV (one line per run) and HTML, and return the paths.

    `note` is a paragraph above the table.
    """
    out.mkdir(parents=True, exist_ok=True)
    tables = summary_rows(results)
    parts = ["# Attack table\n"]
    if note:
        parts = [f"# Attack table\n\n{note}\n"]
    for partition, rows in tables.items():
        cells = [list(row.values()) for row in rows]
        parts.append(f"## {partition}\n\n{markdown_table(list(rows[0]), cells)}\n")
    reasons = dict.fromkeys(f"- {result.rule}: {result.note}" for result in results if result.note)
    if reasons:
        parts.append("Cells without a number:\n\n" + "\n".join(reasons) + "\n")
    write_text(out / "attack.md", "\n".join(parts))
    write_text(out / "attack.csv", as_csv([asdict(result) for result in results]))
    page = write_tables(out / "attack.html", "Attack table", tables, [note])
    return [out / "attack.md", out / "attack.csv", page]
