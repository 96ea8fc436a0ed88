"""Which checkpoints are kept, what the log file says of each round, and schedules of the user's own."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.support.tiny import CNN, tiny

import fedgraft as fg
from fedgraft.core.state import ServerState
from fedgraft.runs.callbacks import Checkpoints
from fedgraft.runs.checkpoint import is_among_best, listing, load, save
from fedgraft.runs.loop import run
from fedgraft.runs.setup import parts_from_config

SCORES = [0.50, 0.70, 0.60, 0.65, 0.72, 0.10, 0.69, 0.20, 0.30, 0.25, 0.15, 0.12]


def kept_rounds(folder: Path, keep_best: int) -> list[int]:
    """Save what a run saves after each of the rounds with these scores; return the rounds that are left."""
    for round, score in enumerate(SCORES, start=1):
        if is_among_best(folder, round, score, keep_best):
            save(folder, round, {}, {"config_digest": "c"}, best=score, keep_last=1, keep_best=keep_best)
    return [load(path).round for path in listing(folder)]


def test_the_best_evaluated_rounds_are_kept_not_the_last_records(tmp_path: Path) -> None:
    """Round 7 (0.69) never was a record, and is the third best."""
    assert kept_rounds(tmp_path / "three", 3) == [2, 5, 7]
    assert kept_rounds(tmp_path / "one", 1) == [5]


def test_only_records_were_saved_before(tmp_path: Path) -> None:
    """The broken variant: a checkpoint for each record keeps round 1 in place of round 7."""
    best = 0.0
    for round, score in enumerate(SCORES, start=1):
        if score > best:
            best = score
            save(tmp_path, round, {}, {"config_digest": "c"}, best=score, keep_last=1, keep_best=3)
    assert [load(path).round for path in listing(tmp_path)] == [1, 2, 5]


def test_a_run_keeps_as_many_as_its_config_says(tmp_path: Path) -> None:
    config = tiny(CNN, "rounds.total=9", "rounds.evaluate_every=1", "rounds.keep_best=2", "rounds.checkpoint_every=9")
    run(config, tmp_path / "run", console=False)
    record = fg.RunFolder.open(tmp_path / "run")
    accuracies = {line["round"]: line["accuracy"] for line in record.metrics() if "accuracy" in line}
    ranked = sorted(accuracies, key=lambda round: (-accuracies[round], round))
    kept = {load(path).round for path in listing(record.checkpoints)}
    assert set(ranked[:2]) <= kept
    scores = {load(path).round: load(path).best for path in listing(record.checkpoints)}
    assert scores[ranked[0]] == pytest.approx(accuracies[ranked[0]])
    log = (tmp_path / "run" / "log.txt").read_text()
    lines = re.findall(r"\| round (\d+) of 9, training loss [\d.]+, validation accuracy", log)
    assert lines == [str(round) for round in range(1, 10)]


def test_a_checkpoint_is_written_when_it_is_due_or_among_the_best() -> None:
    saved: list[int] = []
    good = {2, 7}
    callback = Checkpoints(lambda state: saved.append(state.round), 5, 9, lambda state: state.round in good)
    for round in range(1, 10):
        callback.on_round_committed(state_after(round))
    assert saved == [2, 5, 7, 9]


def state_after(round: int) -> Any:
    class State:
        pass

    state = State()
    state.round = round  # type: ignore[attr-defined]
    return state


class Rates(fg.Callback):
    """The learning rate of each round."""

    def __init__(self) -> None:
        self.rates: list[float] = []

    def on_round_end(self, line: Mapping[str, Any], state: ServerState) -> None:
        self.rates.append(line["lr"])


def own_rate(round: int, rounds: int, losses: Sequence[float]) -> float:
    return 0.1 / (1 + round)


def other_rate(round: int, rounds: int, losses: Sequence[float]) -> float:
    return 0.2 / (1 + round)


def test_a_schedule_of_ones_own_gives_the_rates_and_is_part_of_the_identity(tmp_path: Path) -> None:
    parts = parts_from_config(tiny(CNN))
    recorder = Rates()
    arguments = (parts.algorithm, parts.model, parts.clients)
    fg.run(*arguments, rounds=3, folder=tmp_path / "run", schedule=own_rate, callbacks=[recorder])
    assert recorder.rates == pytest.approx([0.1, 0.05, 0.1 / 3])
    with pytest.raises(fg.FedgraftError) as error:
        fg.run(*arguments, rounds=3, folder=tmp_path / "run", schedule=other_rate)
    assert error.value.code == "E-RUN-FOLDER-FOREIGN"
