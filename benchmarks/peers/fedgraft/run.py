"""`fedgraft run` as a user starts it, with metrics, checkpoints and report on; its record becomes result.json."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "shared"))

from protocol import BEGAN, Clock, from_words, given_folder


def main() -> None:
    folder = given_folder()
    from fedgraft.cli.main import app
    from fedgraft.runs.folder import RunFolder

    marks: list[float] = []
    append = RunFolder.append

    def timed(self: RunFolder, line: Any) -> None:
        append(self, line)
        marks.append(time.perf_counter())

    RunFolder.append = timed  # type: ignore[method-assign]
    run = folder / "run"
    app(["run", str(folder / "config.toml"), "--folder", str(run)], standalone_mode=False)
    write(folder, run, marks)


def write(folder: Path, run: Path, marks: list[float]) -> None:
    """Turn the run's own record into a result; the time between two lines of it is a round, all included."""
    overrides = json.loads((folder / "workload.json").read_text())
    every = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    # Line 0 is the model before training: no peer measures it, and its time is not a round's.
    lines, marks = [line for line in every if line["round"]], marks[len(every) - every[-1]["round"] :]
    summary = json.loads((run / "summary.json").read_text())
    clock = Clock(from_words(overrides))
    evaluating = [line["seconds"].get("evaluate", 0.0) for line in lines]
    first = sum(value for key, value in lines[0]["seconds"].items())
    clock.began = marks[0] - first
    begins = [clock.began, *marks[:-1]]
    clock.rounds = [end - begin - spent for begin, end, spent in zip(begins, marks, evaluating, strict=True)]
    clock.evaluating = sum(evaluating)
    clock.evaluations = [(line["round"], line["accuracy"]) for line in lines if "accuracy" in line]
    clock.steps = sum(len(line["clients"]["ids"]) for line in lines) * clock.workload.steps
    clock.write(
        folder,
        "fedgraft",
        ("torch", "transformers", "peft"),
        summary["test"]["accuracy"],
        bytes_up=lines[-1]["bytes_up"] / len(lines[-1]["clients"]["ids"]),
        coordinates=summary["edited"],
        rounds_end=marks[-1] - BEGAN,
    )


if __name__ == "__main__":
    main()
