"""The attack table: each way of combining times each attack, the same clients lying, accuracy and backdoor apart.

Every cell is a short federation of its own in this process, from the same start (step 0 is honest); data, features and
the network are shared, so a table costs its rounds and little else. The model that is measured is the last one.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from fedgraft import server
from fedgraft import zoo
from fedgraft.algorithm import Algorithm, Mixing, vary
from fedgraft.aggregate.robust import COMBINERS, TooFew
from fedgraft.protocols import Examples
from fedgraft.data.examples import FeatureExamples, ImageExamples
from fedgraft.engines.batched import Batched
from fedgraft.engines.attackers import DATA_ATTACKS, NAMES, Attacked, Trigger, choose_attackers
from fedgraft.engines.in_process import InProcess
from fedgraft.engines.pool import Pool
from fedgraft.errors import FedgraftError
from fedgraft.runs.setup import Setup
from fedgraft.config.load import Config, merge, validate
from fedgraft.report.html import write_tables
from fedgraft.runs.run import one_thread
from fedgraft.report.statistics import table
from fedgraft.runs.head_init import install_head
from fedgraft.local.evaluate import evaluate
from fedgraft.round import run_round

HONEST = "honest"
RULES = (*COMBINERS, "norm_clip", "nnm+median", "nnm+trimmed_mean")
"""Rules by name; `nnm+` before one means nearest-neighbour mixing first."""
_MOST_MARKED = 2000  # test images that carry the trigger: the success is then known to about a percent
_NUMBERS = {
    "classes": "classes_per_client", "shards": "shards_per_client", "dirichlet": "alpha", "dirichlet_balanced": "alpha",
}  # fmt: skip


@dataclass(frozen=True)
class Cell:
    """One federation: who combined how, under which attack, and what came out (fractions; None: it could not run)."""

    partition: str
    rule: str
    attack: str
    accuracy: float | None = None
    backdoor: float | None = None
    """Share of test images of other classes that become the target with the trigger on; None: there are no images."""
    note: str = ""


def attack_table(
    config: Config,
    attacks: Sequence[str],
    rules: Sequence[str],
    share: float = 0.2,
    partitions: Sequence[str] = (),
    report: Callable[[str], None] = print,
) -> list[Cell]:
    """Run every cell: each rule honestly and under each attack, for each partition (`kind` or `kind:number`)."""
    _check(attacks, NAMES, "attack")
    _check(rules, RULES, "rule")
    if config.data.source == "features" and any("backdoor" in name for name in attacks):
        raise FedgraftError("a backdoor is a pattern of pixels, and these data are given features; leave it out.")
    if config.privacy.aggregation == "secure" and (blind := [n for n in attacks if DATA_ATTACKS.get(n, "changes")]):
        raise FedgraftError(
            f"{blind[0]} rewrites changes, and inside a secure sum nobody sees one; use label_flip or backdoor, or "
            "privacy.aggregation='clear'."
        )
    cells: list[Cell] = []
    with one_thread():
        for partition in partitions or (config.partition.kind,):
            arena = Arena(federated(config, partition), share)
            with closing(arena.setup):
                for rule in rules:
                    for attack in (HONEST, *attacks):
                        cells.append(arena.cell(partition, rule, attack))
                        report(_line(cells[-1]))
    return cells


def _check(given: Sequence[str], known: Sequence[str], what: str) -> None:
    for name in given:
        if name not in known:
            raise FedgraftError(f"there is no {what} {name!r}; choose from {', '.join(known)}.")


def federated(config: Config, partition: str) -> Config:
    """The config with its data dealt in another way, such as `stratified` or `dirichlet:0.5`, and a plain mean."""
    kind, _, number = partition.partition(":")
    options: dict[str, object] = {"kind": kind}
    if number:
        if kind not in _NUMBERS:
            raise FedgraftError(f"the partition {kind!r} takes no number; {', '.join(_NUMBERS)} do.")
        try:
            options[_NUMBERS[kind]] = float(number) if "dirichlet" in kind else int(number)
        except ValueError:
            raise FedgraftError(f"the partition {partition!r} needs a number after the colon.") from None
    plain = {"robust": "mean", "neighbours": False, "clip_norm": None, "attackers": 0}
    return validate(merge(config.model_dump(mode="json"), {"partition": options, "algorithm": plain}))


class Arena:
    """One partition with its liars: everything cells have in common."""

    def __init__(self, config: Config, share: float) -> None:
        self.config, self.setup = config, Setup(config)
        self.attackers = choose_attackers(config.partition.clients, share, config.seed)
        self.per_round = self.setup.federation.per_round
        self.expected = math.ceil(len(self.attackers) * self.per_round / config.partition.clients - 1e-9)  # in a cohort
        install_head(self.setup)
        self.setup.open()
        if isinstance(self.setup.algorithm.aggregate, Mixing) or self.setup.algorithm.trainable.needs_each:
            raise FedgraftError(
                f"{config.algorithm.name} with trainable.kind={config.trainable.kind!r} has a way of combining of its own, so "
                "there are no rules to compare; choose another algorithm."
            )
        self.start = self.setup.space.gather(self.setup.network)
        view = self.setup.transform
        mean, std = torch.tensor(view.mean).view(3, 1, 1), torch.tensor(view.std).view(3, 1, 1)
        self.trigger = Trigger(size=max(2, view.image_size // 8), white=(1 - mean) / std)

    def algorithm(self, rule: str) -> Algorithm:
        """The config's algorithm with this rule in place of the mean."""
        if rule == "mean":
            return self.setup.algorithm
        mixed, _, name = rule.rpartition("+")
        return vary(self.setup.algorithm, aggregate=zoo.robust_aggregator(name, self.expected, bool(mixed)))

    def cell(self, partition: str, rule: str, attack: str) -> Cell:
        """Run one federation and measure what it made."""
        try:
            vector = self._run(self.algorithm(rule), attack)
        except TooFew as error:
            return Cell(partition, rule, attack, note=str(error))
        setup = self.setup
        setup.space.scatter(vector, setup.network)
        test = evaluate(setup.network, setup.tests, torch.arange(len(setup.tests)))
        return Cell(partition, rule, attack, test.accuracy, self._success())

    def _success(self) -> float | None:
        """How often the trigger works on the present model; None where there are no images to put it on."""
        marked = self.marked_tests
        return None if marked is None else evaluate(self.setup.network, marked, torch.arange(len(marked))).accuracy

    def _run(self, algorithm: Algorithm, attack: str) -> Tensor:
        setup = self.setup
        setup.context.release()
        setup.space.scatter(self.start, setup.network)
        carrier = self._carrier(algorithm)
        engine: InProcess | Pool | Batched | Attacked = carrier
        if attack != HONEST:
            marked = self.marked if "backdoor" in attack and setup.entry else None
            engine = Attacked(carrier, self.attackers, attack, self.config.seed, self.trigger, marked)
        state = server.start(algorithm, self.start, setup.space.trained)
        try:
            while state.round < self.config.rounds.total:
                state, _ = run_round(algorithm, setup.federation, state, engine, setup.server_context)
        finally:
            if isinstance(carrier, Pool):
                carrier.close()
        return state.vector

    def _carrier(self, algorithm: Algorithm) -> InProcess | Pool | Batched:
        """The engine the config asks for, with a workplace of its own, which an attack may exchange."""
        context, choice = replace(self.setup.context), self.setup.choice(self.setup.context)
        if choice.mode == "batched":
            return Batched(algorithm, context)
        if choice.mode == "in_process":
            return InProcess(algorithm, context)
        return Pool(algorithm, context, choice.workers, self.config.rounds.deadline)

    @cached_property
    def marked(self) -> Examples:
        """Behind kept features: those of the liars' images with the trigger, at the rows of the images."""
        rows, train_images = torch.cat([self.setup.federated.rows(k) for k in sorted(self.attackers)]), self.setup.eval_images
        assert isinstance(train_images, ImageExamples)  # checked before the first cell
        features = self._enter(train_images, rows)
        whole = torch.zeros(len(self.setup.train_images), *features.shape[1:])
        whole[rows] = features
        return FeatureExamples(whole, self.setup.train_images.labels, self.setup.entry)

    @cached_property
    def marked_tests(self) -> FeatureExamples | None:
        """Test images of other classes with the trigger, labelled as the target: accuracy on them is its success."""
        train_images = self.setup.test_images
        if not isinstance(train_images, ImageExamples):
            return None
        others = (train_images.labels != self.trigger.target).nonzero().view(-1)[:_MOST_MARKED]
        features = self._enter(train_images, others)
        return FeatureExamples(features, torch.full((len(others),), self.trigger.target), self.setup.entry)

    @torch.no_grad()
    def _enter(self, train_images: ImageExamples, rows: Tensor) -> Tensor:
        """Images with the trigger, where they enter the network in this run."""
        network, entry = self.setup.network, self.setup.entry
        network.eval()
        parts = [self.trigger(train_images.batch(part)) for part in rows.split(256)]
        return torch.cat([network.features(part, 0, entry) if entry else part for part in parts])


# ---- what is written -------------------------------------------------------------------------------------------------


def summary_rows(cells: Sequence[Cell]) -> dict[str, list[dict[str, str]]]:
    """By partition one row per rule: accuracy honest and under each attack, the worst drop, the backdoor apart."""
    found: dict[str, list[dict[str, str]]] = {}
    for partition in dict.fromkeys(cell.partition for cell in cells):
        here = [cell for cell in cells if cell.partition == partition]
        for rule in dict.fromkeys(cell.rule for cell in here):
            found.setdefault(partition, []).append(_row({c.attack: c for c in here if c.rule == rule}))
    return found


def _row(cells: Mapping[str, Cell]) -> dict[str, str]:
    benign = cells[HONEST]
    drops = {name: worst_drop(benign, cell) for name, cell in cells.items() if name != HONEST}
    known = {name: drop for name, drop in drops.items() if drop is not None}
    stuck = [name for name in drops if name not in known]
    worst = max(known, key=lambda name: known[name], default="")
    backdoors = [c.backdoor for name, c in cells.items() if "backdoor" in name and c.backdoor is not None]
    return {
        "rule": benign.rule,
        **{f"{name} (%)": _percent(cell.accuracy) for name, cell in cells.items()},
        "worst drop": "–" if not worst or stuck else f"{100 * known[worst]:.1f} ({worst})",
        "backdoor, honest (%)": _percent(benign.backdoor),
        "backdoor, worst (%)": _percent(max(backdoors, default=None)),
    }


def worst_drop(benign: Cell, cell: Cell) -> float | None:
    """Accuracy lost to the attack, against the same rule without one."""
    return None if benign.accuracy is None or cell.accuracy is None else benign.accuracy - cell.accuracy


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f}"


def _line(cell: Cell) -> str:
    said = cell.note or f"accuracy {_percent(cell.accuracy)} %, backdoor {_percent(cell.backdoor)} %"
    return f"{cell.partition} / {cell.rule} / {cell.attack}: {said}"


def write(cells: Sequence[Cell], out: Path, note: str = "") -> list[Path]:
    """The table as Markdown, as CSV (one line per cell) and as a page."""
    out.mkdir(parents=True, exist_ok=True)
    tables = summary_rows(cells)
    parts = [f"# Attack table\n\n{note}\n" if note else "# Attack table\n"]
    for partition, rows in tables.items():
        parts.append(f"## {partition}\n\n{table(list(rows[0]), [list(row.values()) for row in rows])}\n")
    if notes := dict.fromkeys(f"- {c.rule}: {c.note}" for c in cells if c.note):
        parts.append("Cells without a number:\n\n" + "\n".join(notes) + "\n")
    (out / "attack.md").write_text("\n".join(parts), encoding="utf-8")
    text = io.StringIO()
    writer = csv.DictWriter(text, list(asdict(cells[0])), lineterminator="\n")
    writer.writeheader()
    writer.writerows(asdict(cell) for cell in cells)
    (out / "attack.csv").write_text(text.getvalue(), encoding="utf-8")
    return [out / "attack.md", out / "attack.csv", write_tables(out / "attack.html", "Attack table", tables, [note])]
