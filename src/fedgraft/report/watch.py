"""A live look at one run in the terminal: curves, clients, bytes and the time left, from the run's files alone."""

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
from fedgraft.report.run_record import RunRecord, present
from fedgraft.report.values import accuracy, clock, metric, percent, seconds_of, size

_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))  # bits of a braille cell: left and right column, downwards
_BLOCKS = "▁▂▃▄▅▆▇█"
_COLOURS = {"running": "cyan", "finished": "green", "interrupted": "yellow", "failed": "red"}
_HEIGHT = 4  # lines of a curve
_CLIENTS = 12  # shown at most, the highest losses first


def watch(folder: Path, console: Console, once: bool = False, every: float = 1.0) -> None:
    """Show a run until it ends, or one frame of it."""
    run = RunRecord.open(folder)
    if once or run.status != "running":
        console.print(frame(run, console.width))
        return
    with Live(frame(run, console.width), console=console, auto_refresh=False) as live:
        while run.status == "running":
            time.sleep(every)
            live.update(frame(run, console.width), refresh=True)
        live.update(frame(run, console.width), refresh=True)  # how it ended


def frame(run: RunRecord, width: int = 80) -> RenderableType:
    """How the run stands now."""
    config, lines, status = from_folder(run.path), run.metrics(), run.status
    central = (run.path / "centralized").exists()
    total = config.centralized.epochs if central else config.rounds.total
    width = max(20, min(width, 110) - 31)  # beside the border, labels, and numbers such as 1.234e-05
    now = [_row("now", text) for text in present(run.path)] if status == "running" else []
    parts: list[RenderableType] = [*now, _progress(lines, ("epoch" if central else "round", total), status, width)]
    for key, label, colour, factor in (
        ("accuracy", "validation %", "green", 100.0),
        ("loss", "validation loss", "magenta", 1.0),
        ("train_loss", "training loss", "blue", 1.0),
    ):
        values = [factor * line[key] for line in lines if line.get(key) is not None]
        if values:
            parts.append(_curve(label, values, colour, width))
    parts += [part for part in (_clients(lines), _traffic(lines), _ending(run, status)) if part is not None]
    title = f"[bold]{config.name}[/]  {config.algorithm.name if not central else 'centralized'}  "
    return Panel(Group(*parts), title=f"{title}[{_COLOURS[status]}]{status}[/]", title_align="left")


def _progress(lines: Sequence[Mapping[str, Any]], until: tuple[str, int], status: str, width: int) -> RenderableType:
    unit, total = until
    done = int(lines[-1]["round"]) if lines else 0
    row = Table.grid(padding=(0, 1))
    left = f"about {clock(time_left(lines, total))} left" if status == "running" and done else ""
    row.add_row(f"{unit} {done}/{total}".ljust(15), ProgressBar(total, done, width=max(10, width - 12)), left)
    return row


def time_left(lines: Sequence[Mapping[str, Any]], total: int) -> float:
    """Seconds that the rounds still to come will take, at the mean pace of the last twenty."""
    recent = [line for line in lines if line["round"]][-20:]  # round 0 is the start, where nobody trains
    return sum(map(seconds_of, recent)) / len(recent) * max(0, total - int(lines[-1]["round"])) if recent else 0.0


def _curve(label: str, values: Sequence[float], colour: str, width: int) -> RenderableType:
    """A curve with its range on the left and its last value on the right."""
    drawn, row = braille(values, width, _HEIGHT), Table.grid(padding=(0, 1))
    scale = [_number(max(values)), *[""] * (_HEIGHT - 2), _number(min(values))]
    row.add_row(
        Text("\n".join(text.rjust(15) for text in [label, *scale])),
        Text("\n".join(["", *drawn]), style=colour),
        Text(f"\n\n{_number(values[-1])}", style="bold"),
    )
    return row


def _number(value: float) -> str:
    return f"{value:.4g}"


def braille(values: Sequence[float], width: int, height: int) -> list[str]:
    """The values as a line of braille dots, `width` by `height` characters, each two dots wide and four high."""
    levels = _levels(values, 2 * width, 4 * height)
    cells = np.zeros((height, width), dtype=int)
    before = levels[0]
    for column, level in enumerate(levels):
        for dot in range(min(before, level), max(before, level) + 1):  # a steep step is drawn as an upright line
            down = 4 * height - 1 - dot
            cells[down // 4, column // 2] |= _DOTS[column % 2][down % 4]
        before = level
    return ["".join(chr(0x2800 + int(cell)) for cell in row) for row in cells]


def _levels(values: Sequence[float], columns: int, steps: int) -> list[int]:
    """One height for each column: means of many values, or straight lines between few."""
    data = np.asarray(values, dtype=float)
    if len(data) > columns:
        data = np.asarray([part.mean() for part in np.array_split(data, columns)])
    data = np.interp(np.linspace(0, 1, columns), np.linspace(0, 1, len(data)), data) if len(data) > 1 else data
    spread = float(np.ptp(data))
    scaled = (data - data.min()) / spread if spread > 0 else np.full(len(data), 0.5)
    return [int(level) for level in np.rint(scaled * (steps - 1))]


def last_losses(lines: Sequence[Mapping[str, Any]]) -> dict[int, float]:
    """The newest training loss of every client that has reported one."""
    found: dict[int, float] = {}
    for line in lines:
        clients = line.get("clients") or {}
        pairs = zip(clients.get("ids") or [], clients.get("loss") or [], strict=False)
        found |= {int(client): float(loss) for client, loss in pairs if loss is not None}
    return found


def _clients(lines: Sequence[Mapping[str, Any]]) -> RenderableType | None:
    """Clients by their last loss, the highest first, each with a block of that height."""
    found = last_losses(lines)
    if not found:
        return None
    top = max(found.values())
    shown = sorted(found, key=lambda client: -found[client])[:_CLIENTS]
    shown_as = [f"#{client}\u00a0{_BLOCKS[_eighth(found[client], top)]}\u00a0{found[client]:.3g}" for client in shown]
    more = f"  and {len(found) - len(shown)} more" if len(found) > len(shown) else ""
    return _row("client losses", "  ".join(shown_as) + more)


def _eighth(value: float, top: float) -> int:
    return min(7, max(0, int(8 * value / top))) if top > 0 else 0


def _traffic(lines: Sequence[Mapping[str, Any]]) -> RenderableType | None:
    up, down = (sum(line.get(key) or 0 for line in lines) for key in ("bytes_up", "bytes_down"))
    if not up + down:
        return None
    rounds = max(1, int(lines[-1]["round"]))
    return _row("sent", f"{size(up)} up, {size(down)} down, {size((up + down) / rounds)} a round")


def _ending(run: RunRecord, status: str) -> RenderableType | None:
    """What a run that is over leaves to say."""
    if status == "finished":
        found = run.summary()
        chosen, test = found.get("validation", {}).get("accuracy"), found.get("test", {})
        if chosen is not None and test.get("accuracy") is not None:
            value, behind = metric(accuracy(test["accuracy"], test.get("count")))
            where = f"validation {percent(chosen)} (round {found['best_round']})"
            return _row("result", f"test {value}{f' ({behind})' if behind else ''}, {where}")
    if status == "failed":
        return _row("failed", run.reason)
    return _row("go on with", f"fedgraft resume {run.path}") if status == "interrupted" else None


def _row(label: str, text: str) -> RenderableType:
    row = Table.grid(padding=(0, 1))
    row.add_row(label.rjust(15), Text(text, overflow="fold"))  # a long path is folded, not cut off
    return row
