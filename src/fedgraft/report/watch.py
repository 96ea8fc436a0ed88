"""Live view of one run in the terminal: curves, clients, bytes and the time left, from the run's files alone."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from fedgraft.config.load import from_folder
from fedgraft.report.run_record import RunRecord, current_phases
from fedgraft.report.values import accuracy, clock, metric, percent, seconds_of, size, total_of

Lines = Sequence[Mapping[str, Any]]
_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))  # bits of a braille cell: left and right column, downwards
_BLOCKS = "▁▂▃▄▅▆▇█"
_COLOURS = {"running": "cyan", "finished": "green", "interrupted": "yellow", "stopped": "yellow", "failed": "red"}
_CURVES = (
    ("accuracy", "validation %", "green", 100.0),
    ("loss", "validation loss", "magenta", 1.0),
    ("train_loss", "training loss", "blue", 1.0),
)
"""Curves of a frame: key of the metrics, label, colour, factor."""
_HEIGHT = 4  # lines of a curve
_CLIENTS = 12  # clients shown, the highest losses first
_RECENT = 20  # rounds from which the time left is estimated


def watch_run(folder: Path, console: Console, once: bool = False, every: float = 1.0) -> None:
    """Show a run in the terminal until it ends, redrawn `every` seconds; with `once` only its present state."""
    run = RunRecord.open(folder)
    if once or run.status != "running":
        console.print(frame(run, console.width))
        return
    with Live(frame(run, console.width), console=console, auto_refresh=False) as live:
        while run.status == "running":
            time.sleep(every)
            live.update(frame(run, console.width), refresh=True)
        live.update(frame(run, console.width), refresh=True)  # its final state


def frame(run: RunRecord, width: int = 80) -> RenderableType:
    """Return the present state of a run as a panel of at most `width` characters, read from its files."""
    config = from_folder(run.path)
    lines = run.metrics()
    status = run.status
    unit = "round"
    total = config.rounds.total
    algorithm = config.algorithm.name
    if config.centralized.active:
        unit = "epoch"
        algorithm = "centralized"
    width = max(20, min(width, 110) - 31)  # beside the border, labels, and numbers such as 1.234e-05
    parts: list[RenderableType] = []
    if status == "running":
        parts += [_row("now", text) for text in current_phases(run.path)]
    parts.append(_progress(lines, unit, total, status, width))
    for key, label, colour, factor in _CURVES:
        values = []
        for line in lines:
            if line.get(key) is not None:
                values.append(factor * line[key])
        if values:
            parts.append(_curve(label, values, colour, width))
    for part in (_clients(lines), _traffic(lines), _ending(run, status)):
        if part is not None:
            parts.append(part)
    title = f"[bold]{config.name}[/]  {algorithm}  [{_COLOURS[status]}]{status}[/]"
    return Panel(Group(*parts), title=title, title_align="left")


def _progress(lines: Lines, unit: str, total: int, status: str, width: int) -> RenderableType:
    """Return the bar of `total` rounds or epochs (`unit`), with the time left while the run is running."""
    done = 0
    if lines:
        done = int(lines[-1]["round"])
    left = ""
    if status == "running" and done:
        left = f"about {clock(time_left(lines, total))} left"
    row = Table.grid(padding=(0, 1))
    row.add_row(f"{unit} {done}/{total}".ljust(15), ProgressBar(total, done, width=max(10, width - 12)), left)
    return row


def time_left(lines: Lines, total: int) -> float:
    """Return the seconds that the rounds up to `total` will take, at the mean pace of the last twenty."""
    recent = [line for line in lines if line["round"]][-_RECENT:]  # nobody trains in round 0
    if not recent:
        return 0.0
    seconds_per_round = sum(map(seconds_of, recent)) / len(recent)
    return seconds_per_round * max(0, total - int(lines[-1]["round"]))


def _curve(label: str, values: Sequence[float], colour: str, width: int) -> RenderableType:
    """Return a row: the label and the range of the values, their curve of `width` characters, the last value."""
    scale = [label, _number(max(values)), *[""] * (_HEIGHT - 2), _number(min(values))]
    row = Table.grid(padding=(0, 1))
    row.add_row(
        Text("\n".join(text.rjust(15) for text in scale)),
        Text("\n".join(["", *braille(values, width, _HEIGHT)]), style=colour),
        Text(f"\n\n{_number(values[-1])}", style="bold"),
    )
    return row


def _number(value: float) -> str:
    """Return a number with four significant digits."""
    return f"{value:.4g}"


def braille(values: Sequence[float], width: int, height: int) -> list[str]:
    """Return the curve of the values as `height` lines of `width` braille characters, each two dots wide, four high."""
    levels = _levels(values, 2 * width, 4 * height)
    cells = np.zeros((height, width), dtype=int)
    before = levels[0]
    for dot_column, level in enumerate(levels):
        for dot in range(min(before, level), max(before, level) + 1):  # a steep step is drawn as an upright line
            down = 4 * height - 1 - dot
            cells[down // 4, dot_column // 2] |= _DOTS[dot_column % 2][down % 4]
        before = level
    lines = []
    for row in cells:
        lines.append("".join(chr(0x2800 + int(cell)) for cell in row))
    return lines


def _levels(values: Sequence[float], columns: int, steps: int) -> list[int]:
    """Return one height, 0 to steps - 1, for each column: means of many values, or linear interpolation of few."""
    data = np.asarray(values, dtype=float)
    if len(data) > columns:
        data = np.asarray([part.mean() for part in np.array_split(data, columns)])
    if len(data) > 1:
        data = np.interp(np.linspace(0, 1, columns), np.linspace(0, 1, len(data)), data)
    spread = float(np.ptp(data))
    if spread > 0:
        scaled = (data - data.min()) / spread
    else:
        scaled = np.full(len(data), 0.5)
    return [int(level) for level in np.rint(scaled * (steps - 1))]


def last_losses(lines: Lines) -> dict[int, float]:
    """Return the newest training loss of every client that has reported one."""
    losses: dict[int, float] = {}
    for line in lines:
        clients = line.get("clients") or {}
        for client, loss in zip(clients.get("ids") or [], clients.get("loss") or [], strict=False):
            if loss is not None:
                losses[int(client)] = float(loss)
    return losses


def _clients(lines: Lines) -> RenderableType | None:
    """Return clients by their last loss, the highest first, each with a block of that height."""
    losses = last_losses(lines)
    if not losses:
        return None
    highest = max(losses.values())
    highest_clients = sorted(losses, key=lambda client: -losses[client])[:_CLIENTS]
    texts = []
    for client in highest_clients:
        loss = losses[client]
        block = _BLOCKS[_block(loss, highest)]
        texts.append(f"#{client}\u00a0{block}\u00a0{loss:.3g}")
    text = "  ".join(texts)
    if len(losses) > len(highest_clients):
        text += f"  and {len(losses) - len(highest_clients)} more"
    return _row("client losses", text)


def _block(value: float, highest: float) -> int:
    """Return the index in `_BLOCKS` for a value, in eighths of the highest."""
    if highest <= 0:
        return 0
    return min(7, max(0, int(8 * value / highest)))


def _traffic(lines: Lines) -> RenderableType | None:
    """Return the bytes sent so far; None if there are none."""
    up = total_of(lines, "bytes_up")
    down = total_of(lines, "bytes_down")
    if not up + down:
        return None
    rounds = max(1, int(lines[-1]["round"]))
    return _row("sent", f"{size(up)} up, {size(down)} down, {size((up + down) / rounds)} per round")


def _ending(run: RunRecord, status: str) -> RenderableType | None:
    """Return the result of a finished run, the reason of a failed one, or how to continue another one."""
    if status == "finished":
        return _final_result(run.summary())
    if status == "failed":
        return _row("failed", run.reason)
    if status in {"interrupted", "stopped"}:
        return _row("continue with", f"fedgraft resume {run.path}")
    return None


def _final_result(summary: Mapping[str, Any]) -> RenderableType | None:
    """Return test and validation accuracy of a finished run; None if it has none."""
    validation = summary.get("validation", {}).get("accuracy")
    test = summary.get("test", {})
    if validation is None or test.get("accuracy") is None:
        return None
    value, evidence = metric(accuracy(test["accuracy"], test.get("count")))
    text = f"test {value}"
    if evidence:
        text += f" ({evidence})"
    return _row("result", f"{text}, validation {percent(validation)} (round {summary['best_round']})")


def _row(label: str, text: str) -> RenderableType:
    """Return one row of the display: a label, right-aligned, and its text."""
    row = Table.grid(padding=(0, 1))
    row.add_row(label.rjust(15), Text(text, overflow="fold"))  # a long path is folded, not cut off
    return row
