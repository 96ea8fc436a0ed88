"""What a person sees while a run goes: a live line with an estimate, then a table."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table


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
            self.numbers["accuracy"] = f"[green]val {100 * line['accuracy']:.2f} %[/]"
        self.bar.update(self.task, completed=line["round"], numbers="  ".join(self.numbers.values()))


def size(count: float) -> str:
    """Bytes for people."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    raise AssertionError


def results(console: Console, title: str, summary: Mapping[str, Any]) -> None:
    """The final table of a run."""
    table = Table(title=escape(title), show_header=False, title_justify="left")
    rows = [
        ("validation accuracy", _percent(summary.get("validation", {}).get("accuracy"))),
        ("test accuracy", _percent(summary.get("test", {}).get("accuracy"))),
        ("test top-5", _percent(summary.get("test", {}).get("top5"))),
        ("test loss", f"{summary.get('test', {}).get('loss', float('nan')):.4f}"),
        ("best round", str(summary.get("best_round", ""))),
        ("rounds", str(summary.get("rounds", ""))),
        (
            "weights edited",
            f"{summary['edited']['coordinates']:,} of {summary['edited']['of']:,}" if "edited" in summary else "",
        ),
        ("sent up / down", f"{size(summary.get('bytes_up', 0))} / {size(summary.get('bytes_down', 0))}"),
        ("seconds", f"{summary.get('seconds', 0):.1f}"),
    ]
    for key, value in (summary.get("personal") or {}).items():
        rows.append((f"personal {key.replace('_', ' ')}", _percent(value)))
    for left, right in rows:
        table.add_row(left, right)
    console.print(table)


def runs_table(console: Console, infos: list[Any]) -> None:
    """The table of `fedgraft list`."""
    table = Table("run", "status", "round", "best val", "test", "sent", "seconds")
    for info in infos:
        table.add_row(
            escape(info.name), info.status, str(info.round), _percent(info.best), _percent(info.test),
            size(info.bytes or 0), f"{info.seconds or 0:.0f}",
        )  # fmt: skip
    console.print(table)


def _percent(value: float | None) -> str:
    return "" if value is None or value < 0 else f"{100 * value:.2f} %"


def path_line(console: Console, folder: Path, report: bool = True) -> None:
    """Where to look next."""
    console.print(f"run folder  {folder}", highlight=False, soft_wrap=True, markup=False)
    if report and (folder / "report.html").exists():
        console.print(f"report      {folder / 'report.html'}", highlight=False, soft_wrap=True, markup=False)
