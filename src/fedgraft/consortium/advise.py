"""Advice on what to train with this data and budget: short trials of the usual candidates, and the cheapest good one.

Each candidate (the head, last blocks, a sparse edit, low rank) is a short run at its default learning rate on a share
of the data, a cell of an ordinary sweep. Among the candidates whose rounds fit the budget and whose accuracy is within
one standard error of the best (the rule of Breiman et al. 1984), the one that sends least is recommended: differences
that a trial cannot resolve are decided by cost.
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
from fedgraft.consortium.sweep import Cell, Estimate, Report, finished_summary, folder_of, process_cells, vary_config
from fedgraft.core.errors import FedgraftError
from fedgraft.core.files import read_metrics
from fedgraft.metrics.intervals import wilson
from fedgraft.report.values import clock, size

BLOCKS = 4
"""Last blocks that a candidate trains, if it trains the body; features before them are computed once."""
VALIDATION = 0.3
"""Share of a trial's images that it is validated on."""
_UNITS = {"": 1, "B": 1, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}
_COLUMNS = ("start (%)", "trial (%)", "rounds", "to send", "time")


def bytes_of(text: str) -> float:
    """Return `50MB` as a number of bytes."""
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", text)
    if match is None or match[2].upper() not in _UNITS or not float(match[1]):
        raise FedgraftError(
            "E-CONSORTIUM-BUDGET",
            f"--budget is {text!r}, which is not an amount of data",
            "write for example 50MB or 1.5GB",
            budget=text,
        )
    return float(match[1]) * _UNITS[match[2].upper()]


def candidates(config: Config) -> dict[str, dict[str, Any]]:
    """Return the candidates, cheapest first: the `trainable` table of each by its label; opens data and network."""
    dataset = open_data(config)
    depth = build_network(config, dataset).depth
    tables: dict[str, dict[str, Any]] = {"head": {"kind": "head"}}
    if depth:
        last = min(BLOCKS, depth)
        frozen = max(0, depth - BLOCKS)
        tables["lora"] = {"kind": "lora", "freeze_blocks": frozen}
        tables["sparse 90 %"] = {"kind": "sparse", "freeze_blocks": frozen, "sparse": {"sparsity": 0.9}}
        tables[f"last {last} blocks"] = {"kind": "last_blocks", "blocks": last}
    return tables


@dataclass(frozen=True)
class Candidate:
    """One way to train (head, low rank, ...), the result of its trial, and the cost of the whole run."""

    label: str
    config: Config
    """The whole run, with as many rounds as fit the budget."""
    start: float = 0.0
    """Validation accuracy of the initial model."""
    accuracy: float = 0.0
    """Validation accuracy after the trial."""
    count: int = 1
    """Validation images of the trial."""
    round_bytes: float = 0.0
    """Bytes of one round, both ways."""
    planned_rounds: int = 0
    """Rounds of the config."""
    rounds: int = 0
    """Rounds that fit the budget."""
    seconds: float = 0.0
    """Estimated time of the run that fits."""
    excluded: str = ""
    """Why it is not recommended; empty if it may be."""

    @property
    def total_bytes(self) -> float:
        """Bytes of the rounds that fit, or of the planned rounds if none fits."""
        return self.round_bytes * (self.rounds or self.planned_rounds)

    @property
    def error(self) -> float:
        """The standard error of the accuracy."""
        return float((self.accuracy * (1 - self.accuracy) / self.count) ** 0.5)

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % interval of the accuracy."""
        low, high = wilson(self.accuracy * self.count, self.count)
        return float(low), float(high)

    def columns(self) -> dict[str, str]:
        """Return its numbers as cells of a table; empty cells if it was not tried."""
        if not self.round_bytes:
            return dict.fromkeys(_COLUMNS, "")
        low, high = self.interval
        duration = ""
        if self.rounds:
            duration = clock(self.seconds)
        return {
            "start (%)": f"{100 * self.start:.1f}",
            "trial (%)": f"{100 * self.accuracy:.1f} ({100 * low:.1f} to {100 * high:.1f})",
            "rounds": str(self.rounds),
            "to send": size(self.total_bytes),
            "time": duration,
        }


@dataclass(frozen=True)
class Advice:
    """All candidates and the budget."""

    candidates: tuple[Candidate, ...]
    budget: float

    @property
    def best(self) -> Candidate:
        """The candidate that sends least among those within a standard error of the most accurate that fits."""
        eligible = [candidate for candidate in self.candidates if not candidate.excluded]
        if not eligible:
            reasons = "; ".join(f"{candidate.label}: {candidate.excluded}" for candidate in self.candidates)
            raise FedgraftError(
                "E-CONSORTIUM-NOTHING-FITS",
                f"no candidate fits {size(self.budget)} ({reasons})",
                "raise --budget or --minutes",
                budget=self.budget,
            )
        top = max(eligible, key=lambda candidate: candidate.accuracy)
        close = [candidate for candidate in eligible if candidate.accuracy >= top.accuracy - top.error]
        return min(close, key=lambda candidate: (candidate.total_bytes, -candidate.accuracy))

    def rows(self) -> list[dict[str, str]]:
        """Return the candidates as rows of a table."""
        best = None
        if not all(candidate.excluded for candidate in self.candidates):
            best = self.best
        table = []
        for candidate in self.candidates:
            status = candidate.excluded or self.over_budget(candidate) or "fits"
            if candidate is best:
                status = "best"
            table.append({"candidate": candidate.label, **candidate.columns(), "status": status})
        return table

    def over_budget(self, candidate: Candidate) -> str:
        """Return by how much the planned rounds exceed the budget, and how many fit; empty if all fit."""
        planned_bytes = candidate.round_bytes * candidate.planned_rounds
        if candidate.excluded or planned_bytes <= self.budget:
            return ""
        excess = size(planned_bytes - self.budget)
        return f"{candidate.planned_rounds} rounds are {excess} over the budget; {candidate.rounds} fit"


def advise_settings(
    config: Config,
    budget: float,
    root: Path,
    minutes: float | None = None,
    rounds: int = 4,
    images: int = 2000,
    report: Report = print,
) -> Advice:
    """Try every candidate in a short run and return all of them with the estimated cost of the whole run.

    Args:
        config: the whole run that is planned.
        budget: bytes that it may send, both ways.
        root: folder of the trial runs; finished ones are not repeated.
        minutes: time for all trials; None: no limit.
        rounds: rounds of a trial.
        images: images of a trial.
        report: prints a line.
    """
    all_images = len(open_data(config).train)
    trial_images = min(images, all_images)
    data = {
        "limit": max(1, round(trial_images * (1 - VALIDATION))),
        "validation": VALIDATION * trial_images / all_images,
    }
    trial_rounds = {"total": rounds, "evaluate_every": 1, "test": False, "patience": 0}
    cells = {}
    for label, trainable in candidates(config).items():
        short = vary_config(config, data=data, rounds=trial_rounds, trainable=trainable)
        cells[label] = Cell(label, short, folder_of(short, root))
    deadline = time.monotonic() + 60 * (minutes or 1e9)
    failures: dict[str, str] = {}
    estimate = Estimate(len(cells))

    def time_is_up(cell: Cell | None = None) -> bool:
        return time.monotonic() > deadline

    def waiting() -> Iterator[Cell]:
        """Yield the trials that are not finished while there is time."""
        for cell in cells.values():
            if finished_summary(cell.folder) is None and not time_is_up():
                report(f"trying {cell.label}: {rounds} rounds on {trial_images:,} images")
                yield cell

    def ended(cell: Cell, last: str) -> None:
        """Report the end of a trial; note the reason (`last`: its last line of output) if it did not finish."""
        summary = finished_summary(cell.folder)
        if summary is None:
            failures[cell.label] = last or f"trial not finished within {minutes:g} minutes"
            text = last or "stopped"
        else:
            text = f"{100 * summary['validation']['accuracy']:.1f} %"
        report(estimate.step(f"{cell.label}: {text}"))

    process_cells(waiting(), ended, time_is_up, processes=0)
    not_tried = f"not tried within {minutes or 0:g} minutes"
    results = []
    for label, cell in cells.items():
        reason = failures.get(label, not_tried)
        results.append(_extrapolate(cell, config, budget, reason, all_images / trial_images))
    return Advice(tuple(results), budget)


def _extrapolate(cell: Cell, config: Config, budget: float, reason: str, times_images: float) -> Candidate:
    """Return the candidate with its trial's result and the cost of the whole run.

    Args:
        cell: the trial.
        config: the whole run.
        budget: bytes that it may send.
        reason: why the trial is not finished, if it is not.
        times_images: how many times more images the whole run has.
    """
    trainable = cell.config.trainable.model_dump(mode="json", exclude_unset=True, exclude_none=True)
    whole = vary_config(config, trainable=trainable)
    summary = finished_summary(cell.folder)
    if summary is None:
        return Candidate(cell.label, whole, excluded=reason)
    lines = read_metrics(cell.folder)
    planned_rounds = config.rounds.total
    trial_rounds = cell.config.rounds.total
    round_bytes = (summary["bytes_up"] + summary["bytes_down"]) / trial_rounds
    fitting_rounds = min(planned_rounds, int(budget // round_bytes))
    excluded = ""
    if fitting_rounds:
        whole = vary_config(whole, rounds={"total": fitting_rounds})
    else:
        excluded = f"one round is {size(round_bytes)}, {size(round_bytes - budget)} over the budget"
    total_seconds = float(summary["seconds"])
    setup_seconds = total_seconds - sum(sum(line.get("seconds", {}).values()) for line in lines)
    training_seconds = fitting_rounds * (total_seconds - setup_seconds) / trial_rounds
    count = 1
    if cell.config.data.limit:
        count = round(cell.config.data.limit * VALIDATION)
    return Candidate(
        cell.label,
        whole,
        start=float(lines[0]["accuracy"]),
        accuracy=float(summary["validation"]["accuracy"]),
        count=count,
        round_bytes=round_bytes,
        planned_rounds=planned_rounds,
        rounds=fitting_rounds,
        seconds=max(0.0, setup_seconds) * times_images + training_seconds,
        excluded=excluded,
    )


def recommendation(advice: Advice) -> list[str]:
    """Return the advice as sentences: the best candidate, those over the budget, and a warning if nothing improved."""
    best = advice.best
    gain = best.accuracy - best.start
    low, high = best.interval
    lines = [
        f"train {best.label}: {best.rounds} rounds, {size(best.total_bytes)} of {size(advice.budget)}, about "
        f"{clock(best.seconds)} here; expect {100 * best.accuracy:.1f} % or more ({100 * low:.1f} to {100 * high:.1f}: "
        f"95 % interval of {best.count} validation images after the trial), {100 * gain:+.1f} points over the initial "
        "model"
    ]
    for candidate in advice.candidates:
        text = advice.over_budget(candidate)
        if text:
            lines.append(f"{candidate.label}: {text}")
    if gain <= 0:
        lines.append("no candidate improved on its initial model in the trial: try more --rounds, or find-lr")
    return lines


def to_file(advice: Advice, path: Path, command: str) -> None:
    """Write the recommended config as a TOML file, without options at their default; `command` is its first comment."""
    import tomli_w

    table = advice.best.config.model_dump(mode="json", exclude_unset=True, exclude_none=True)
    path.write_text(f"# {command}\n# {recommendation(advice)[0]}\n\n{tomli_w.dumps(table)}")
