"""Terminal output of runs: live progress with an estimate, the final table, and the table of several runs."""

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
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as ProgressBars
from rich.table import Column, Table
from rich.text import Text

from fedgraft.core.progress import Phase
from fedgraft.core.text import printable
from fedgraft.report.values import NONE, accuracy, clock, format_epsilon, label, metric, metric_column, percent, size

if TYPE_CHECKING:
    from fedgraft.report.run_record import RunInfo


FEW = 10
"""With so many classes or fewer, top-5 accuracy says little."""
CLIENTS = 40
"""Clients whose row is printed."""


class LiveProgress:
    """Phases and rounds as bars in a terminal, else as plain lines now and then; implements `tracking.Progress`.

    Everything is drawn by `look`, which a timer calls: a round costs nothing here.
    """

    bar_after = 1.0
    """Seconds until a phase gets a bar."""
    line_after = 2.0
    """Seconds until a phase gets a line."""
    every = 5.0
    """Seconds between two lines."""

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
        self.bar = ProgressBars(*columns, console=console, transient=False, auto_refresh=False)
        self.bars: dict[Phase, TaskID] = {}
        self.printed_at: dict[Phase, float] = {}
        """The age of each phase when its last line was printed."""
        self.rounds: Any = None
        self.total = 0
        self.done = 0
        self.printed_round = 0
        self.last_line = time.monotonic()
        self.numbers: dict[str, str] = {}

    def __enter__(self) -> LiveProgress:
        return self

    def __exit__(self, *ignored: object) -> None:
        self.look([])
        self._show_round(ended=True)
        if self.bar.tasks:
            self.bar.refresh()
        if self.live:
            self.bar.stop()

    def start(self, total: int, done: int, text: str) -> None:
        """Begin a run of `total` rounds, of which `done` were finished before; print `text`, which describes it."""
        self.console.print(printable(text), highlight=False, markup=False)
        self.total = total
        self.done = done
        self.printed_round = done
        self.numbers = {}
        if self.live:
            if self.rounds is not None:  # one run after another: each has the bar for itself
                self.bar.remove_task(self.rounds)
            self.rounds = self.bar.add_task("round", total=total, completed=done, numbers="")

    def update(self, line: Mapping[str, Any]) -> None:
        """Note one more round; `look` draws it."""
        if line.get("train_loss") is not None:
            self.numbers["loss"] = f"loss {line['train_loss']:.3f}"
        if line.get("accuracy") is not None:
            self.numbers["accuracy"] = f"val {percent(line['accuracy'])}"
        self.done = line["round"]

    def look(self, phases: Sequence[Phase]) -> None:
        """Draw the present round, and bars or lines for the phases that have lasted some seconds.

        `phases` are under way.
        """
        self._show_round()
        if self.live:
            self._draw_bars(phases)
        else:
            self._print_phases(phases)

    def _show_round(self, ended: bool = False) -> None:
        """Update the bar of rounds, or print a line if the last one is some seconds old or the run has `ended`."""
        if self.live and self.rounds is not None:
            self.bar.update(self.rounds, completed=self.done, numbers="  ".join(self.numbers.values()))
            return
        is_due = ended or time.monotonic() - self.last_line >= self.every
        if self.done != self.printed_round and is_due:
            numbers = "".join(f", {number}" for number in self.numbers.values())
            self.print_line(f"round {self.done} of {self.total}{numbers}")
            self.printed_round = self.done

    def _draw_bars(self, phases: Sequence[Phase]) -> None:
        """Draw a bar for each phase that lasts, and remove those of ended phases."""
        ended = [phase for phase in self.bars if phase not in phases]
        for phase in ended:
            self.bar.remove_task(self.bars.pop(phase))
        for phase in phases:
            if phase not in self.bars and phase.seconds > self.bar_after:
                self.bars[phase] = self.bar.add_task(cell(phase.name), total=phase.total or None, numbers="")
            if phase in self.bars:
                numbers = ""
                if phase.unit:
                    numbers = f"{phase.unit}  {phase.rate:,.1f}/s"
                self.bar.update(self.bars[phase], completed=phase.done, total=phase.total or None, numbers=numbers)
        if self.bar.tasks:
            self.bar.start()
            self.bar.refresh()
        else:  # release the terminal
            self.bar.stop()

    def _print_phases(self, phases: Sequence[Phase]) -> None:
        """Print a line about the phases that last, if the innermost has had none for some seconds."""
        self.printed_at = {phase: age for phase, age in self.printed_at.items() if phase in phases}
        lasting = [phase for phase in phases if phase.seconds >= self.line_after]
        if not lasting:
            return
        innermost = lasting[-1]
        if innermost.seconds - self.printed_at.get(innermost, -self.every) >= self.every:
            for phase in lasting:
                self.printed_at[phase] = phase.seconds
            self.print_line("; ".join(map(str, lasting)))

    def print_line(self, text: str) -> None:
        """Print a line above the bars."""
        self.console.print(printable(text), highlight=False, markup=False, soft_wrap=True)
        self.last_line = time.monotonic()


def cell(text: str) -> str:
    """Return a text as a cell shows it: word for word, and without what moves the cursor."""
    return escape(printable(text))


def protection_rows(privacy: Mapping[str, Any]) -> dict[str, str]:
    """Return the first rows of a private run's result by label: guarantee, for whom it holds, what it leaves out."""
    if not privacy:
        return {}
    guarantee = (
        f"epsilon {format_epsilon(privacy['epsilon'])} at delta {privacy['delta']:.2g} for each {privacy['unit']}"
    )
    rows = {"privacy": guarantee}
    known = "  if cohorts are known"
    if privacy["unit"] == "record":
        known = "  if draws are known"
    rows[known] = f"epsilon {format_epsilon(privacy['epsilon_without_amplification'])}"
    if privacy["repeatable_noise"]:
        rows["  REPEATABLE"] = "for experiments: noise and cohorts follow from the seed and protect nobody"
    first, *others = privacy["not_covered"]
    rows["  not covered"] = f"{first}; {len(others)} more in report.html"
    return rows


def print_results(console: Console, title: str, summary: Mapping[str, Any]) -> None:
    """Print the final table of a run under `title`, from its summary.json, and a row per client.
    A private run's guarantee comes first; otherwise the note about the delivered model does.
    """
    private = bool(summary.get("privacy"))
    if not private:
        _print_note(console, summary)
    rows = protection_rows(summary.get("privacy") or {})
    rows |= _test_rows(summary)
    rows |= _validation_rows(summary)
    rows |= _cost_rows(summary)
    rows |= _personal_rows(summary.get("personal") or {})
    table = Table(title=cell(title), show_header=False, title_justify="left")
    for row in rows.items():
        table.add_row(*row)
    if console.is_terminal:  # sentences, which may have several lines; nothing here is for copying
        console.print(table)
    else:
        print_table(console, table)
    if private:
        _print_note(console, summary)
    _print_clients(console, summary.get("clients") or {})
    for column, groups in (summary.get("subgroups") or {}).items():
        _print_clients(console, {value: cells or {} for value, cells in groups.items()}, label(column))


def _test_rows(summary: Mapping[str, Any]) -> dict[str, str]:
    """Return the rows of the metrics on the test images, by label."""
    rows = {}
    for key, value in (summary.get("metrics") or {}).items():
        if value and ":" not in key:
            rows[f"test {label(key)}"] = " - ".join(metric(value))
    test = summary.get("test") or {}
    if test.get("accuracy") is None or "test accuracy" in rows:
        return rows
    number, evidence = metric(accuracy(test["accuracy"], test.get("count")))
    rows["test accuracy"] = number
    if evidence:
        rows["test accuracy"] = f"{number} - {evidence}"
    if (summary.get("data") or {}).get("classes", 0) > FEW:
        rows["test top-5"] = percent(test.get("top5"))
    rows["test loss"] = NONE
    if test.get("loss") is not None:
        rows["test loss"] = f"{test['loss']:.4f}"
    return rows


def _validation_rows(summary: Mapping[str, Any]) -> dict[str, str]:
    """Return the rows of the validation metrics with their round, by label."""
    rows = {}
    for key, value in (summary.get("validation") or {}).items():
        where = f"round {summary.get('best_round')} of {summary.get('rounds')}"
        if key == "accuracy" and summary.get("best_round") and summary.get("start") is not None:
            where += f"; {percent(summary['start'])} at the start"
        number = f"{value:.4f}"
        if key.endswith("accuracy"):
            number = percent(value)
        rows[f"validation {label(key)}"] = f"{number} ({where})"
    return rows


def _cost_rows(summary: Mapping[str, Any]) -> dict[str, str]:
    """Return the rows of weights trained, traffic and time, by label."""
    rows = {}
    edited = summary.get("edited")
    if edited:
        rows["weights trained"] = f"{edited['coordinates']:,} of {edited['of']:,}"
    rows["sent up / down"] = f"{size(summary.get('bytes_up', 0))} / {size(summary.get('bytes_down', 0))}"
    outside = summary.get("bytes_up_outside_rounds", 0) + summary.get("bytes_down_outside_rounds", 0)
    if outside:
        rows["outside the rounds"] = size(outside)
    rows["time"] = clock(summary.get("seconds", 0))
    return rows


def _personal_rows(personal: Mapping[str, Any]) -> dict[str, str]:
    """Return the rows of the clients' own accuracies, by label; `personal` is that table of the summary."""
    rows = {}
    for prefix, model in (("", "own test images"), ("finetuned_", "after fine-tuning")):
        if f"{prefix}mean" in personal:
            mean = percent(personal.get(f"{prefix}mean"))
            low = percent(personal.get(f"{prefix}min"))
            high = percent(personal.get(f"{prefix}max"))
            rows[f"clients, {model}"] = f"{mean} ({low} to {high})"
    return rows


def _print_note(console: Console, summary: Mapping[str, Any]) -> None:
    """Print the note about the delivered model, if there is one."""
    if "note" in summary:
        console.print(summary["note"], style="yellow", highlight=False, markup=False)


def _print_clients(console: Console, clients: Mapping[str, Mapping[str, Any]], heading: str = "client") -> None:
    """Print one row per client (or subgroup) with its metrics on its test images, for the first `CLIENTS` of them.

    Metrics of single classes are in the report. `heading` is that of the first column.
    """
    keys: dict[str, None] = {}
    for values in clients.values():
        for key in values:
            if ":" not in key:
                keys[key] = None
    if not keys:
        return
    table = Table(escape(heading), *map(label, keys), box=box.SIMPLE_HEAD, pad_edge=False)
    first_clients = dict(list(clients.items())[:CLIENTS])
    columns = []
    for key in keys:
        metrics = [values.get(key) for values in first_clients.values()]
        columns.append(metric_column(metrics))
    for name, *cells in zip(first_clients, *columns, strict=True):
        table.add_row(cell(name), *cells)
    print_table(console, table)


def print_runs(console: Console, infos: Sequence[RunInfo]) -> None:
    """Print the table of `fedgraft list`."""
    heads = ("status", "round", "best val", "test", "sent", "time", "run")  # names may be long, so they come last
    table = Table(*heads, box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for info in infos:
        rounds = NONE
        sent = NONE
        seconds = NONE
        if info.round is not None:
            rounds = str(info.round)
        if info.bytes:
            sent = size(info.bytes)
        if info.seconds:
            seconds = clock(info.seconds)
        name = cell(str(info.path))
        table.add_row(info.status, rounds, percent(info.best), percent(info.test), sent, seconds, name)
    print_table(console, table)


def print_classes(console: Console, classes: Sequence[str], metrics: Mapping[str, Any]) -> None:
    """Print the metrics of each class: number of images, sensitivity with its interval, F1 and AUROC."""
    heads = ("class", "images", "sensitivity", "95 % interval", "F1", "AUROC")
    table = Table(*heads, box=box.SIMPLE_HEAD, pad_edge=False)
    for name in classes:
        sensitivity = metrics.get(f"sensitivity:{name}")
        cells = ["0", NONE, NONE]
        if sensitivity is not None:
            interval = f"{percent(sensitivity.low, 1)} to {percent(sensitivity.high, 1)}"
            cells = [str(sensitivity.n), percent(sensitivity.value, 1), interval]
        for key in ("f1", "auroc"):
            value = metrics.get(f"{key}:{name}")
            if value is None:
                cells.append(NONE)
            else:
                cells.append(f"{value.value:.3f}")
        table.add_row(cell(name), *cells)
    print_table(console, table)


def print_paths(console: Console, folder: Path, report: bool = True) -> None:
    """Print the path of the run folder and, with `report`, that of its report if it exists."""
    console.print(f"run folder  {folder}", highlight=False, soft_wrap=True, markup=False)
    if report and (folder / "report.html").exists():
        console.print(f"report      {folder / 'report.html'}", highlight=False, soft_wrap=True, markup=False)


def print_next_commands(console: Console, folder: Path) -> None:
    """Print three commands for a finished run, as they work in this terminal."""
    console.print("next:", highlight=False)
    for arguments in (f"show {folder}", f"predict {folder} IMAGES", f"export {folder} adapted"):
        console.print(f"  {program_name()} {arguments}", highlight=False, soft_wrap=True, markup=False)


def program_name() -> str:
    """Return how `fedgraft` is started here: by its name, or by its path if the environment is not active."""
    started = Path(sys.argv[0])
    if started.name != "fedgraft" or not started.is_file():
        return "fedgraft"
    on_path = shutil.which("fedgraft")
    if on_path and started.samefile(on_path):
        return "fedgraft"
    return str(started)


def print_table(console: Console, table: Table) -> None:
    """Print a table as wide as its texts, however narrow the terminal: text to be copied is never cut."""
    for table_column in table.columns:
        table_column.no_wrap = True
    width = console.measure(table, options=console.options.update(max_width=10_000)).maximum
    table.width = None
    if width > console.width:
        table.width = width
    options = console.options.update(max_width=max(width, console.width))
    for segments in console.render_lines(table, options, pad=False):
        line = Text.assemble(*((segment.text, segment.style or "") for segment in segments))
        line.rstrip()  # blanks beyond the edge would be lines of their own
        if not line.plain.strip("─ "):
            line.truncate(console.width)
        console.print(line, crop=False, soft_wrap=True)
