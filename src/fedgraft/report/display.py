"""What a person sees while a run goes: a live line with an estimate, then a table; and the table of several runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from fedgraft.report.values import NONE, accuracy, clock, label, metric, percent, size

if TYPE_CHECKING:
    from fedgraft.runs.run_folder import RunInfo


class LiveProgress:
    """A progress bar of rounds with the newest numbers; implements `run.Progress`."""

    def __init__(self, console: Console) -> None:
        self.console = console
        columns = (
            TextColumn("[bold]{task.fields[what]}"), BarColumn(bar_width=24), MofNCompleteColumn(),
            TextColumn("{task.fields[numbers]}"), TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(),
        )  # fmt: skip
        self.bar = Progress(*columns, console=console, transient=False)
        self.task: Any = None
        self.numbers: dict[str, str] = {}

    def __enter__(self) -> LiveProgress:
        return self

    def __exit__(self, *ignored: object) -> None:
        self.bar.stop()

    def start(self, total: int, done: int, text: str) -> None:
        """Begin; `done` rounds were finished before."""
        self.console.print(text, highlight=False, markup=False)
        self.task = self.bar.add_task("", total=total, completed=done, what="round", numbers="")
        self.bar.start()

    def update(self, line: Mapping[str, Any]) -> None:
        """Show one more round."""
        if line.get("train_loss") is not None:
            self.numbers["loss"] = f"loss {line['train_loss']:.3f}"
        if line.get("accuracy") is not None:
            self.numbers["accuracy"] = f"[green]val {percent(line['accuracy'])}[/]"
        self.bar.update(self.task, completed=line["round"], numbers="  ".join(self.numbers.values()))


def results(console: Console, title: str, summary: Mapping[str, Any]) -> None:
    """The final table of a run; what it did not measure is left out. Where nothing was gained, that comes first."""
    if note := summary.get("note"):
        console.print(note, highlight=False, markup=False, soft_wrap=True)
    test, found = summary.get("test") or {}, summary.get("metrics") or {}
    rows = {f"test {label(key)}": " - ".join(metric(value)) for key, value in found.items() if value and ":" not in key}
    if test.get("accuracy") is not None and "test accuracy" not in rows:
        rows["test accuracy"] = " - ".join(
            part for part in metric(accuracy(test["accuracy"], test.get("count"))) if part
        )
        rows["test top-5"] = percent(test.get("top5"))
        rows["test loss"] = f"{test['loss']:.4f}" if test.get("loss") is not None else NONE
    best = percent((summary.get("validation") or {}).get("accuracy"))
    rows["validation accuracy"] = f"{best} (round {summary.get('best_round')} of {summary.get('rounds')})"
    if edited := summary.get("edited"):
        rows["weights trained"] = f"{edited['coordinates']:,} of {edited['of']:,}"
    rows["sent up / down"] = f"{size(summary.get('bytes_up', 0))} / {size(summary.get('bytes_down', 0))}"
    rows["time"] = clock(summary.get("seconds", 0))
    personal = summary.get("personal") or {}
    for prefix, model in (("", "own test images"), ("finetuned_", "after fine-tuning")):
        if f"{prefix}mean" in personal:
            mean, least, most = (percent(personal.get(prefix + key)) for key in ("mean", "min", "max"))
            rows[f"clients, {model}"] = f"{mean} ({least} to {most})"
    table = Table(title=escape(title), show_header=False, title_justify="left")
    for row in rows.items():
        table.add_row(*row)
    _print(console, table)


def runs_table(console: Console, infos: Sequence[RunInfo]) -> None:
    """The table of `fedgraft list`."""
    table = Table("run", "status", "round", "best val", "test", "sent", "time", box=box.SIMPLE_HEAD, pad_edge=False)
    for info in infos:
        done = NONE if info.round is None else str(info.round)
        costs = size(info.bytes) if info.bytes else NONE, clock(info.seconds) if info.seconds else NONE
        table.add_row(escape(info.name), info.status, done, percent(info.best), percent(info.test), *costs)
    _print(console, table)


def path_line(console: Console, folder: Path, report: bool = True) -> None:
    """Where to look next."""
    console.print(f"run folder  {folder}", highlight=False, soft_wrap=True, markup=False)
    if report and (folder / "report.html").exists():
        console.print(f"report      {folder / 'report.html'}", highlight=False, soft_wrap=True, markup=False)


def _print(console: Console, table: Table) -> None:
    """A table as wide as its texts, however narrow the terminal: what must be copied is never cut."""
    for column in table.columns:
        column.no_wrap = True
    wide = console.measure(table, options=console.options.update(max_width=10_000)).maximum
    table.width = wide if wide > console.width else None
    console.print(table, crop=False)
