"""The attack table: a sweep over ways to aggregate times attacks, the same clients attacking; accuracy and backdoor.

Every cell is a run; each rule is also run benign, and an attack's harm is the drop from there. The runs follow each
other in this process: their starts would cost more than two at a time could save, and large ones have `workers`.
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
from fedgraft.consortium.search_tables import as_csv, spread
from fedgraft.consortium.sweep import Cell, Report, finished, folder_of, run_cells, vary
from fedgraft.core.errors import FedgraftError
from fedgraft.core.files import write_text
from fedgraft.engines.attackers import DATA_ATTACKS, NAMES, choose_attackers
from fedgraft.metrics.statistics import table
from fedgraft.report.html import write_tables

RULES = (*AGGREGATORS, "nnm+median", "nnm+trimmed_mean")
"""Rules by name; `nnm+` before one means nearest-neighbour mixing first."""
_NUMBERS = {
    "classes": "classes_per_client",
    "shards": "shards_per_client",
    "dirichlet": "alpha",
    "dirichlet_balanced": "alpha",
}


Known = Mapping[tuple[str, str], Path]
"""Runs that were made before, by the attack with its share of clients, and the digest of the config."""


@dataclass(frozen=True)
class Measured:
    """One run: how it aggregated, under which attack, and what came out (fractions; None: it could not run)."""

    partition: str
    rule: str
    attack: str
    seed: int
    accuracy: float | None = None
    backdoor: float | None = None
    """Share of test images of other classes that become the target with the trigger on; None: there are no images."""
    note: str = ""

    @property
    def label(self) -> str:
        """The run in words."""
        return f"{self.partition} / {self.rule} / {self.attack} / seed {self.seed}"


@dataclass(frozen=True)
class AttackPlan:
    """Each rule benign and under each attack, for each partition (`kind` or `kind:number`) and seed."""

    config: Config
    attacks: Sequence[str]
    rules: Sequence[str]
    share: float = 0.2
    partitions: Sequence[str] = ()
    seeds: Sequence[int] = ()

    def __post_init__(self) -> None:
        config = self.config
        for what, given, known in (("attack", self.attacks, NAMES), ("rule", self.rules, RULES)):
            if wrong := [name for name in given if name not in known]:
                raise FedgraftError(f"there is no {what} {wrong[0]!r}; choose from {', '.join(known)}.")
        if config.data.source == "features" and any("backdoor" in name for name in self.attacks):
            raise FedgraftError("a backdoor is a pattern of pixels, and these data are given features; leave it out.")
        blind = [name for name in self.attacks if DATA_ATTACKS.get(name, name)]
        if config.privacy.aggregation == "secure" and blind:
            raise FedgraftError(
                f"{blind[0]} rewrites updates, and under secure aggregation nobody sees one; use label_flip or "
                "backdoor, or privacy.aggregation='clear'."
            )

    def cells(self, root: Path, known: Known | None = None) -> dict[Measured, Cell]:
        """Every run of the table, where it is known to be or below `root`."""
        wanted = itertools.product(
            self.seeds or [self.config.seed],
            self.partitions or [self.config.partition.kind],
            self.rules,
            [BENIGN, *self.attacks],
        )
        found: dict[Measured, Cell] = {}
        for seed, partition, rule, attack in wanted:
            one, config = Measured(partition, rule, attack, seed), self._config(partition, rule, seed)
            at = f"{attack}-{self.share:g}"
            folder = (known or {}).get((at, config.digest)) or folder_of(config, root / at)
            found[one] = Cell(one.label, config, folder, special=partial(run_attacked, kind=attack, share=self.share))
        return found

    def _config(self, partition: str, rule: str, seed: int) -> Config:
        """The run's config: its attackers are no part of it, but how many a rule should expect in a cohort is."""
        clients = self.config.partition.clients
        attackers = len(choose_attackers(clients, self.share, seed))
        expected = math.ceil(attackers * per_round(self.config) / clients - 1e-9)
        mixed, _, name = rule.rpartition("+")
        robust = {"robust": name, "attackers": expected if rule != "mean" else 0, "neighbours": bool(mixed)}
        return vary(
            self.config,
            seed=seed,
            partition=partition_of(partition),
            algorithm={**robust, "clip_norm": None},
            rounds={"evaluate_every": 0, "test": False},
        )


def partition_of(text: str) -> dict[str, object]:
    """`stratified` or `dirichlet:0.5` as options."""
    kind, _, number = text.partition(":")
    if not number:
        return {"kind": kind}
    if kind not in _NUMBERS:
        raise FedgraftError(f"the partition {kind!r} takes no number; {', '.join(_NUMBERS)} do.")
    try:
        return {"kind": kind, _NUMBERS[kind]: float(number) if "dirichlet" in kind else int(number)}
    except ValueError:
        raise FedgraftError(f"the partition {text!r} needs a number after the colon.") from None


def attack_table(plan: AttackPlan, root: Path, report: Report = print, known: Known | None = None) -> list[Measured]:
    """Run every cell; one that cannot run has a note instead of numbers, and where none can, its reason is raised."""
    cells = plan.cells(root, known)
    for cell in cells.values():
        if finished(cell.folder) and not (cell.folder / OUTCOME).exists():  # killed before the model was measured
            shutil.rmtree(cell.folder)
    found, failed = run_cells(list(cells.values()), 0, report)
    if not found:
        raise FedgraftError(next(iter(failed.values())))
    return [replace(one, note=failed.get(one.label, "")) for one in outcomes(cells)]


def outcomes(cells: Mapping[Measured, Cell]) -> list[Measured]:
    """Every cell with the numbers that its finished run left; without them where it left none."""
    files = {one: cell.folder / OUTCOME for one, cell in cells.items()}
    return [replace(one, **json.loads(file.read_text())) if file.exists() else one for one, file in files.items()]


# ---- what is written -------------------------------------------------------------------------------------------------


def summary_rows(found: Sequence[Measured]) -> dict[str, list[dict[str, str]]]:
    """By partition one row per rule: accuracy benign and under each attack, the worst drop, the backdoor apart."""
    tables: dict[str, list[dict[str, str]]] = {}
    for partition, rule in dict.fromkeys((one.partition, one.rule) for one in found):
        here: dict[str, list[Measured]] = {}
        for one in found:
            if (one.partition, one.rule) == (partition, rule):
                here.setdefault(one.attack, []).append(one)
        tables.setdefault(partition, []).append(_row(rule, here))
    return tables


def _row(rule: str, by_attack: Mapping[str, Sequence[Measured]]) -> dict[str, str]:
    accuracy = {name: _known([one.accuracy for one in seeds]) for name, seeds in by_attack.items()}
    backdoor = {name: _known([one.backdoor for one in seeds]) for name, seeds in by_attack.items()}
    benign = accuracy[BENIGN]
    drops = {name: fmean(benign) - fmean(values) for name, values in accuracy.items() if values and benign}
    worst = max((name for name in drops if name != BENIGN), key=lambda name: drops[name], default="")
    doors = [values for name, values in backdoor.items() if "backdoor" in name and values]
    return {
        "rule": rule,
        **{f"{name} (%)": spread(values) or "–" for name, values in accuracy.items()},
        # A missing cell may have been the worst.
        "worst drop": f"{100 * drops[worst]:.1f} ({worst})" if worst and len(drops) == len(accuracy) else "–",
        "backdoor, benign (%)": spread(backdoor[BENIGN]) or "–",
        "backdoor, worst (%)": spread(max(doors, key=fmean, default=[])) or "–",
    }


def _known(values: Sequence[float | None]) -> list[float]:
    """The values, or none where one is missing."""
    return [value for value in values if value is not None] if None not in values else []


def write(found: Sequence[Measured], out: Path, note: str = "") -> list[Path]:
    """The table as Markdown, as CSV (one line per run) and as a page."""
    out.mkdir(parents=True, exist_ok=True)
    tables = summary_rows(found)
    parts = [f"# Attack table\n\n{note}\n" if note else "# Attack table\n"]
    for partition, rows in tables.items():
        parts.append(f"## {partition}\n\n{table(list(rows[0]), [list(row.values()) for row in rows])}\n")
    if notes := dict.fromkeys(f"- {one.rule}: {one.note}" for one in found if one.note):
        parts.append("Cells without a number:\n\n" + "\n".join(notes) + "\n")
    write_text(out / "attack.md", "\n".join(parts))
    write_text(out / "attack.csv", as_csv([asdict(one) for one in found]))
    return [out / "attack.md", out / "attack.csv", write_tables(out / "attack.html", "Attack table", tables, [note])]
