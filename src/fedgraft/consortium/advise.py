"""What to train on this data with this budget: the usual candidates, each tried briefly, and the cheapest good one.

Each candidate (the head, last blocks, a sparse edit, low rank) is a short run at its default rates on a share of the
data, a cell of an ordinary sweep. From the candidates whose rounds fit the budget the one that sends least is
recommended among those within one standard error of the best (the rule of Breiman et al. 1984): what a trial cannot
tell apart is decided by cost.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedgraft.config.build import build_network
from fedgraft.config.federate import open_data
from fedgraft.config.load import Config
from fedgraft.consortium.sweep import Cell, Estimate, Report, finished, folder_of, vary, work
from fedgraft.core.errors import FedgraftError
from fedgraft.core.files import read_metrics
from fedgraft.metrics.intervals import wilson
from fedgraft.report.values import clock, size

BLOCKS = 4  # of the last blocks, where a candidate moves the body: what lies before them is computed once
VALIDATION = 0.3  # share of a trial's images that judge it
_UNITS = {"": 1, "B": 1, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}


def bytes_of(text: str) -> float:
    """`50MB` as a number of bytes."""
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", text)
    if match is None or match[2].upper() not in _UNITS or not float(match[1]):
        raise FedgraftError(f"--budget takes an amount such as 50MB or 1.5GB, not {text!r}.")
    return float(match[1]) * _UNITS[match[2].upper()]


def candidates(config: Config) -> dict[str, dict[str, Any]]:
    """What is tried, cheapest first: the `trainable` table of each."""
    dataset = open_data(config)
    depth = build_network(config, dataset).depth
    last, early = min(BLOCKS, depth), max(0, depth - BLOCKS)
    found: dict[str, dict[str, Any]] = {"head": {"kind": "head"}}
    if depth:
        found["lora"] = {"kind": "lora", "freeze_blocks": early}
        found["sparse 90 %"] = {"kind": "sparse", "freeze_blocks": early, "sparse": {"sparsity": 0.9}}
        found[f"last {last} blocks"] = {"kind": "last_blocks", "blocks": last}
    return found


@dataclass(frozen=True)
class Tried:
    """A candidate, what its trial gave, and what the whole run would cost."""

    label: str
    config: Config
    """The whole run, with as many rounds as fit the budget."""
    start: float = 0.0
    accuracy: float = 0.0
    count: int = 1
    """Validation images that judged it."""
    each: float = 0.0
    """Bytes of one round, both ways."""
    wanted: int = 0
    """Rounds that were wished for."""
    rounds: int = 0
    """That fit the budget."""
    seconds: float = 0.0
    """Of the run that fits."""
    said: str = ""
    """Why it is out of the question; empty where it is not."""

    @property
    def sends(self) -> float:
        """Bytes of the rounds that fit, or, where none does, of those wished for."""
        return self.each * (self.rounds or self.wanted)

    @property
    def error(self) -> float:
        """The standard error of the accuracy."""
        return float((self.accuracy * (1 - self.accuracy) / self.count) ** 0.5)

    def shown(self) -> dict[str, str]:
        """Its numbers for people."""
        low, high = self.interval
        return {
            "start (%)": f"{100 * self.start:.1f}",
            "trial (%)": f"{100 * self.accuracy:.1f} ({100 * low:.1f} to {100 * high:.1f})",
            "rounds": str(self.rounds),
            "to send": size(self.sends),
            "time": clock(self.seconds) if self.rounds else "",
        }

    @property
    def interval(self) -> tuple[float, float]:
        """The accuracy's 95 % interval."""
        low, high = wilson(self.accuracy * self.count, self.count)
        return float(low), float(high)


@dataclass(frozen=True)
class Advice:
    """All candidates, and which one to take."""

    tried: tuple[Tried, ...]
    budget: float

    @property
    def best(self) -> Tried:
        """The one that sends least among those within a standard error of the most accurate that fits."""
        good = [one for one in self.tried if not one.said]
        if not good:
            reasons = "; ".join(f"{one.label}: {one.said}" for one in self.tried)
            raise FedgraftError(f"nothing fits {size(self.budget)} ({reasons}); raise --budget or --minutes.")
        top = max(good, key=lambda one: one.accuracy)
        close = [one for one in good if one.accuracy >= top.accuracy - top.error]
        return min(close, key=lambda one: (one.sends, -one.accuracy))

    def rows(self) -> list[dict[str, str]]:
        """The candidates for people."""
        best = None if all(one.said for one in self.tried) else self.best
        return [
            {
                "candidate": one.label,
                **(
                    one.shown()
                    if one.each
                    else dict.fromkeys(("start (%)", "trial (%)", "rounds", "to send", "time"), "")
                ),
                "status": "best" if one is best else one.said or self.over(one) or "fits",
            }
            for one in self.tried
        ]

    def over(self, one: Tried) -> str:
        """By how much the rounds that were wished for are over the budget, and how many fit."""
        all_of_it = one.each * one.wanted
        if one.said or all_of_it <= self.budget:
            return ""
        return f"{one.wanted} rounds are {size(all_of_it - self.budget)} over the budget; {one.rounds} fit"


def advise(
    config: Config,
    budget: float,
    root: Path,
    minutes: float | None = None,
    rounds: int = 4,
    images: int = 2000,
    report: Report = print,
) -> Advice:
    """Try every candidate for so many rounds on so many images, and say what each whole run would cost."""
    held = len(open_data(config).train)
    few = min(images, held)
    trial: dict[str, Any] = {
        "data": {"limit": max(1, round(few * (1 - VALIDATION))), "validation": VALIDATION * few / held},
        "rounds": {"total": rounds, "evaluate_every": 1, "test": False, "patience": 0},
    }
    cells = {
        label: Cell(label, short, folder_of(short, root))
        for label, trainable in candidates(config).items()
        for short in [vary(config, **trial, trainable=trainable)]
    }
    until, failed, estimate = time.monotonic() + 60 * (minutes or 1e9), dict[str, str](), Estimate(len(cells))

    def over(cell: Cell | None = None) -> bool:
        return time.monotonic() > until

    def waiting() -> Iterator[Cell]:
        for cell in cells.values():
            if finished(cell.folder) is None and not over():
                report(f"trying {cell.label}: {rounds} rounds on {few:,} images")
                yield cell

    def ended(cell: Cell, last: str) -> None:
        summary = finished(cell.folder)
        text = f"{100 * summary['validation']['accuracy']:.1f} %" if summary else last or "stopped"
        if summary is None:
            failed[cell.label] = last or f"not tried to the end: {minutes:g} minutes were over"
        report(estimate.step(f"{cell.label}: {text}"))

    work(waiting(), ended, over, processes=0)
    late = f"not tried: {minutes or 0:g} minutes were over"
    tried = [_judged(cell, config, budget, failed.get(label, late), held / few) for label, cell in cells.items()]
    return Advice(tuple(tried), budget)


def _judged(cell: Cell, config: Config, budget: float, why: str, more: float) -> Tried:
    """What the trial of a candidate says of the whole run; `more` is how many times more images that has."""
    trainable = cell.config.trainable.model_dump(mode="json", exclude_unset=True, exclude_none=True)
    whole, summary = vary(config, trainable=trainable), finished(cell.folder)
    if summary is None:
        return Tried(cell.label, whole, said=why)
    lines, wanted, done = read_metrics(cell.folder), config.rounds.total, cell.config.rounds.total
    each = (summary["bytes_up"] + summary["bytes_down"]) / done
    fit = min(wanted, int(budget // each))
    said = "" if fit else f"one round is {size(each)}, {size(each - budget)} over the budget"
    begin = float(summary["seconds"]) - sum(sum(line.get("seconds", {}).values()) for line in lines)
    spent = max(0.0, begin) * more + fit * (float(summary["seconds"]) - begin) / done
    if fit:
        whole = vary(whole, rounds={"total": fit})
    count = round(cell.config.data.limit * VALIDATION) if cell.config.data.limit else 1
    return Tried(
        cell.label,
        whole,
        float(lines[0]["accuracy"]),
        float(summary["validation"]["accuracy"]),
        count,
        each,
        wanted,
        fit,
        spent,
        said,
    )


def recommendation(advice: Advice) -> list[str]:
    """The advice in sentences."""
    best, gain = advice.best, advice.best.accuracy - advice.best.start
    low, high = best.interval
    lines = [
        f"train {best.label}: {best.rounds} rounds, {size(best.sends)} of {size(advice.budget)}, about "
        f"{clock(best.seconds)} here; expect {100 * best.accuracy:.1f} % or more ({100 * low:.1f} to {100 * high:.1f}: "
        f"95 % of {best.count} validation images, after the trial alone), {100 * gain:+.1f} points on its start"
    ]
    lines += [f"{one.label}: {text}" for one in advice.tried if (text := advice.over(one))]
    if gain <= 0:
        lines.append("no candidate improved on its start in the trial: try more rounds (--rounds) or find-lr.")
    return lines


def to_file(advice: Advice, path: Path, command: str) -> None:
    """The recommended config as a TOML file: what was said, nothing that is a default."""
    import tomli_w

    table = advice.best.config.model_dump(mode="json", exclude_unset=True, exclude_none=True)
    path.write_text(f"# {command}\n# {recommendation(advice)[0]}\n\n{tomli_w.dumps(table)}")
