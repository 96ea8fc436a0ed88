"""The rounds of a run as a table, with what the round log attests of each; and the end of the run's log."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from fedgraft.report.run_record import RunRecord
from fedgraft.report.values import clock, percent, seconds_of, size

ROWS = 200
"""Rounds of one table."""
_LOG_BYTES = 64_000
ROUND_LOG = "rounds.log"


def round_rows(run: RunRecord, lines: Sequence[Mapping[str, Any]], before: int | None = None) -> list[dict[str, Any]]:
    """Return at most `ROWS` rounds, the newest first, each with its result, its traffic and what the round log attests.

    `lines` are the recorded rounds; with `before` only those before that round.
    """
    chosen = []
    for line in reversed(lines):
        if before is None or line.get("round", 0) < before:
            chosen.append(line)
        if len(chosen) == ROWS:
            break
    attested = _attested(run.path / ROUND_LOG, {line.get("round") for line in chosen})
    rows = []
    for line in chosen:
        entry = attested.get(line.get("round"), {})
        updates = ""
        if isinstance(entry.get("updates"), Mapping):
            updates = str(len(entry["updates"]))
        rows.append(
            {
                "round": str(line.get("round")),
                "accuracy": _or_dash(line.get("accuracy"), percent),
                "loss": _or_dash(line.get("loss"), "{:.4f}".format),
                "training loss": _or_dash(line.get("train_loss"), "{:.4f}".format),
                "clients": str(len((line.get("clients") or {}).get("ids") or [])),
                "dropped": str(len(line.get("dropped") or [])),
                "up": _or_dash(line.get("bytes_up"), size),
                "down": _or_dash(line.get("bytes_down"), size),
                "time": clock(seconds_of(line)),
                "updates attested": updates,
                "protection": str(entry.get("protection", "")),
                "model": str(entry.get("model", ""))[:16],
            }
        )
    return rows


def _or_dash(value: Any, form: Any) -> str:
    """Return a number as `form` writes it; a dash without one."""
    if value is None:
        return "–"
    return str(form(value))


def _attested(path: Path, rounds: set[Any]) -> dict[Any, dict[str, Any]]:
    """Return the entries of the round log for these rounds; without a log, or behind damage, none.

    Nothing is verified here: that is what `fedgraft verify` is for.
    """
    entries: dict[Any, dict[str, Any]] = {}
    with suppress(OSError, ValueError, TypeError, KeyError), path.open("rb") as file:
        for text in file:
            entry = dict(json.loads(text)["entry"])
            if entry.get("round") in rounds:
                entries[entry["round"]] = entry
    return entries


def log_tail(folder: Path) -> str:
    """Return the end of a run's log; empty without one."""
    path = folder / "log.txt"
    if not path.is_file():
        return ""
    with path.open("rb") as file:
        length = file.seek(0, 2)
        file.seek(max(0, length - _LOG_BYTES))
        data = file.read()
    if length > _LOG_BYTES:
        data = data[data.find(b"\n") + 1 :]
    return data.decode(errors="replace")
