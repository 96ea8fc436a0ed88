"""What a person sees while a run goes: a live line with an estimate, then a table; and the table of several runs."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Column, Table
from rich.text import Text

from fedgraft.core.progress import Phase
from fedgraft.report.values import NONE, accuracy, clock, column, epsilon, label, metric, percent, size

if TYPE_CHECKING:
    from fedgraft.report.run_record import RunInfo


FEW = 10
"""With so many classes or fewer, a class among the five likeliest says little."""


class LiveProgress:
    """Phases and rounds as bars in a terminal, else as plain lines now and then; implements `tracking.Progress`.

    Everything is drawn by `look`, by time: a round costs nothing here.
    """

    shows, says, every = 1.0, 2.0, 5.0
    """Seconds until a phase gets a bar, until it gets a line, and between two lines."""

    def __init__(self, console: Console) -> None:
        self.console = console
        columns = (
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TextColumn("{task.fields[numbers]}"),
            TimeElapsedColumn(table_column=Column(min_width=7, no_wrap=True)),
            TextColumn("·"),
            TimeRemainingColumn(table_column=Column(min_width=7, no_wrap=True)),
            TextColumn("left"),
        )
        self.live = console.is_terminal and not console.is_jupyter
        self.bar = Progress(*columns, console=console, transient=False, auto_refresh=False)
        self.bars: dict[Phase, TaskID] = {}
        self.said: dict[Phase, float] = {}
        self.rounds: Any = None
        self.total = self.done = self.shown = 0
        self.spoke = time.monotonic()
        self.numbers: dict[str, str] = {}

    def __enter__(self) -> LiveProgress:
        return self

    def __exit__(self, *ignored: object) -> None:
        self.look([])
        self._round(ended=True)
        if self.bar.tasks:
            self.bar.refresh()
        if self.live:
            self.bar.stop()

    def start(self, total: int, done: int, text: str) -> None:
        """Begin; `done` rounds were finished before."""
        self.console.print(text, highlight=False, markup=False)
        self.total, self.done, self.shown = total, done, done
        self.numbers = {}
        if self.live:
            if self.rounds is not None:  # one run after another: each has the line for itself
                self.bar.remove_task(self.rounds)
            self.rounds = self.bar.add_task("round", total=total, completed=done, numbers="")

    def update(self, line: Mapping[str, Any]) -> None:
        """Note one more round; it is drawn when it is time."""
        if line.get("train_loss") is not None:
            self.numbers["loss"] = f"loss {line['train_loss']:.3f}"
        if line.get("accuracy") is not None:
            self.numbers["accuracy"] = f"val {percent(line['accuracy'])}"
        self.done = line["round"]

    def look(self, phases: Sequence[Phase]) -> None:
        """Draw the rounds, and what lasts."""
        self._round()
        (self._draw if self.live else self._say)(phases)

    def _round(self, ended: bool = False) -> None:
        if self.live and self.rounds is not None:
            self.bar.update(self.rounds, completed=self.done, numbers="  ".join(self.numbers.values()))
        elif self.done != self.shown and (ended or time.monotonic() - self.spoke >= self.every):
            numbers = "".join(f", {number}" for number in self.numbers.values())
            self.say(f"round {self.done} of {self.total}{numbers}")
            self.shown = self.done

    def _draw(self, phases: Sequence[Phase]) -> None:
        for gone in [one for one in self.bars if one not in phases]:
            self.bar.remove_task(self.bars.pop(gone))
        for one in phases:
            if one not in self.bars and one.seconds > self.shows:
                self.bars[one] = self.bar.add_task(escape(one.name), total=one.total or None, numbers="")
            if one in self.bars:
                numbers = f"{one.unit}  {one.rate:,.1f}/s" if one.unit else ""
                self.bar.update(self.bars[one], completed=one.done, total=one.total or None, numbers=numbers)
        if self.bar.tasks:
            self.bar.start()
            self.bar.refresh()
        else:  # somebody else may want the terminal
            self.bar.stop()

    def _say(self, phases: Sequence[Phase]) -> None:
        self.said = {one: when for one, when in self.said.items() if one in phases}
        lasting = [one for one in phases if one.seconds >= self.says]
        if lasting and lasting[-1].seconds - self.said.get(lasting[-1], -self.every) >= self.every:
            self.said |= {one: one.seconds for one in lasting}
            self.say("; ".join(map(str, lasting)))

    def say(self, text: str) -> None:
        """A line above the bars."""
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)
        self.spoke = time.monotonic()


def protection_rows(told: Mapping[str, Any]) -> dict[str, str]:
    """The first lines of a private run's result: what is promised to whom, and what is not."""
    if not told:
        return {}
    rows = {"privacy": f"epsilon {epsilon(told['epsilon'])} at delta {told['delta']:.2g} for each {told['unit']}"}
    rows["  if cohorts are known"] = f"epsilon {epsilon(told['epsilon_without_amplification'])}"
    if told["repeatable_noise"]:
        rows["  REPEATABLE"] = "for experiments: noise and cohorts follow from the seed and protect nobody"
    rows["  outside"] = f"{told['not_covered'][0]}; {len(told['not_covered']) - 1} more in report.html"
    return rows


def results(console: Console, title: str, summary: Mapping[str, Any]) -> None:
    """The final table of a run; what it did not measure is left out. First comes what a private run promises, else a
    note about the delivered model."""
    private = bool(summary.get("privacy"))
    if not private:
        _note(console, summary)
    test, found = summary.get("test") or {}, summary.get("metrics") or {}
    rows = protection_rows(summary.get("privacy") or {})
    rows |= {f"test {label(key)}": " - ".join(metric(v)) for key, v in found.items() if v and ":" not in key}
    if test.get("accuracy") is not None and "test accuracy" not in rows:
        rows["test accuracy"] = " - ".join(
            part for part in metric(accuracy(test["accuracy"], test.get("count"))) if part
        )
        if (summary.get("data") or {}).get("classes", 0) > FEW:
            rows["test top-5"] = percent(test.get("top5"))
        rows["test loss"] = f"{test['loss']:.4f}" if test.get("loss") is not None else NONE
    for key, value in (summary.get("validation") or {}).items():
        begun = ""
        if key == "accuracy" and summary.get("best_round") and summary.get("start") is not None:
            begun = f"; {percent(summary['start'])} at the start"
        at = f" (round {summary.get('best_round')} of {summary.get('rounds')}{begun})"
        rows[f"validation {label(key)}"] = (percent(value) if key.endswith("accuracy") else f"{value:.4f}") + at
    if edited := summary.get("edited"):
        rows["weights trained"] = f"{edited['coordinates']:,} of {edited['of']:,}"
    rows["sent up / down"] = f"{size(summary.get('bytes_up', 0))} / {size(summary.get('bytes_down', 0))}"
    before = summary.get("bytes_up_outside_rounds", 0) + summary.get("bytes_down_outside_rounds", 0)
    rows |= {"outside the rounds": size(before)} if before else {}
    rows["time"] = clock(summary.get("seconds", 0))
    personal = summary.get("personal") or {}
    for prefix, model in (("", "own test images"), ("finetuned_", "after fine-tuning")):
        if f"{prefix}mean" in personal:
            mean, least, most = (percent(personal.get(prefix + key)) for key in ("mean", "min", "max"))
            rows[f"clients, {model}"] = f"{mean} ({least} to {most})"
    table = Table(title=escape(title), show_header=False, title_justify="left")
    for row in rows.items():
        table.add_row(*row)
    if console.is_terminal:  # sentences, which may have several lines; nothing to copy is among them
        console.print(table)
    else:
        print_table(console, table)
    if private:
        _note(console, summary)
    _clients(console, summary.get("clients") or {})


def _note(console: Console, summary: Mapping[str, Any]) -> None:
    if "note" in summary:
        console.print(summary["note"], style="yellow", highlight=False, markup=False)


def _clients(console: Console, clients: Mapping[str, Mapping[str, Any]]) -> None:
    """One row for each client: its metrics on its own test images; those of single classes are in the report."""
    keys = dict.fromkeys(key for found in clients.values() for key in found if ":" not in key)
    if not keys:
        return
    table = Table("client", *map(label, keys), box=box.SIMPLE_HEAD, pad_edge=False)
    shown = dict(list(clients.items())[:40])
    columns = [column([found.get(key) for found in shown.values()]) for key in keys]
    for name, *cells in zip(shown, *columns, strict=True):
        table.add_row(escape(name), *cells)
    print_table(console, table)


def runs_table(console: Console, infos: Sequence[RunInfo]) -> None:
    """The table of `fedgraft list`."""
    heads = ("status", "round", "best val", "test", "sent", "time", "run")  # names may be long, so they come last
    table = Table(*heads, box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for info in infos:
        done = NONE if info.round is None else str(info.round)
        costs = size(info.bytes) if info.bytes else NONE, clock(info.seconds) if info.seconds else NONE
        table.add_row(info.status, done, percent(info.best), percent(info.test), *costs, escape(str(info.path)))
    print_table(console, table)


def class_table(console: Console, classes: Sequence[str], metrics: Mapping[str, Any]) -> None:
    """Metrics of each class: how many images, how many are found (with an interval), F1 and AUROC."""
    heads = ("class", "images", "sensitivity", "95 % interval", "F1", "AUROC")
    table = Table(*heads, box=box.SIMPLE_HEAD, pad_edge=False)
    for name in classes:
        found, f1, auroc = (metrics.get(f"{key}:{name}") for key in ("sensitivity", "f1", "auroc"))
        cells = [NONE, NONE]
        if found is not None:
            cells = [percent(found.value, 1), f"{percent(found.low, 1)} to {percent(found.high, 1)}"]
        rest = (NONE if one is None else f"{one.value:.3f}" for one in (f1, auroc))
        table.add_row(escape(name), str(0 if found is None else found.n), *cells, *rest)
    print_table(console, table)


def path_line(console: Console, folder: Path, report: bool = True) -> None:
    """Where to look next."""
    console.print(f"run folder  {folder}", highlight=False, soft_wrap=True, markup=False)
    if report and (folder / "report.html").exists():
        console.print(f"report      {folder / 'report.html'}", highlight=False, soft_wrap=True, markup=False)


def next_lines(console: Console, folder: Path) -> None:
    """Three things to do with a finished run, as this terminal would take them."""
    console.print("next:", highlight=False)
    for words in (f"show {folder}", f"predict {folder} IMAGES", f"export {folder} adapted"):
        console.print(f"  {command()} {words}", highlight=False, soft_wrap=True, markup=False)


def command() -> str:
    """How `fedgraft` is started here: by its name, or by its path where the environment is not active."""
    started = Path(sys.argv[0])
    found = shutil.which("fedgraft")
    by_path = started.name == "fedgraft" and started.is_file() and (not found or not started.samefile(found))
    return str(started) if by_path else "fedgraft"


def print_table(console: Console, table: Table) -> None:
    """A table as wide as its texts, however narrow the terminal: what must be copied is never cut."""
    for one in table.columns:
        one.no_wrap = True
    wide = console.measure(table, options=console.options.update(max_width=10_000)).maximum
    table.width = wide if wide > console.width else None
    for segments in console.render_lines(table, console.options.update(max_width=max(wide, console.width)), pad=False):
        line = Text.assemble(*((one.text, one.style or "") for one in segments))
        line.rstrip()  # blanks beyond the edge would be lines of their own
        if not line.plain.strip("─ "):
            line.truncate(console.width)
        console.print(line, crop=False, soft_wrap=True)
