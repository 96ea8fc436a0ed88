"""Callbacks: the order of events, and runs that a callback stops and that are continued to the same bytes."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.support.errors import raises
from tests.support.tiny import same_bits, tensors_of, without_pictures

import fedgraft as fg
from fedgraft.config.load import load
from fedgraft.core.files import without_timing
from fedgraft.core.state import ServerState
from fedgraft.runs import checkpoint
from fedgraft.runs import loop as loop_module
from fedgraft.runs.callbacks import EarlyStopping
from fedgraft.runs.folder import RunFolder
from fedgraft.runs.saving import Best
from fedgraft.runs.secrets import secret_path

CONFIG = [
    "model.name=tiny",
    "data.source=digits",
    "data.image_size=16",
    "data.limit=60",
    "partition.clients=3",
    "rounds.total=3",
    "rounds.evaluate_every=2",
    "rounds.checkpoint_every=100",
    "local.steps=2",
    "local.lr=0.02",
    "workers=1",
]
EVENTS = [name for name in vars(fg.Callback) if name.startswith("on_")]


@pytest.fixture(scope="module", autouse=True)
def quick() -> Iterator[None]:
    """No figures and no report."""
    with without_pictures():
        yield


@pytest.fixture(scope="module")
def parts() -> Callable[[], fg.RunParts]:
    """Makes the parts of the run of these tests anew: a run changes its network."""
    from fedgraft.runs.setup import parts_from_config

    return lambda: parts_from_config(load(None, CONFIG))


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory, parts: Callable[[], fg.RunParts], quick: None) -> fg.Result:
    """The run that nobody stops."""
    return fg.run(parts(), folder=tmp_path_factory.mktemp("unbroken") / "run")


class Recorder(fg.Callback):
    """Notes the names of all events with their round."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def __getattribute__(self, name: str) -> Any:
        if name not in EVENTS:
            return super().__getattribute__(name)

        def record(*arguments: Any) -> None:
            rounds = [argument.round for argument in arguments if isinstance(argument, ServerState)]
            self.events.append(" ".join([name.removeprefix("on_"), *map(str, rounds)]))

        return record


class StopAt(fg.Callback):
    """Stops a run at an event of a round."""

    def __init__(self, round: int, event: str = "on_round_end", final: bool = False) -> None:
        self.round = round
        self.event = event
        self.stop = fg.StopRun("it is late", final)

    def on_round_start(self, state: ServerState, best: Best) -> fg.StopRun | None:
        return self.stop if (state.round, self.event) == (self.round, "on_round_start") else None

    def on_round_end(self, line: Mapping[str, Any], state: ServerState) -> fg.StopRun | None:
        return self.stop if (state.round, self.event) == (self.round, "on_round_end") else None


def test_events_come_in_order(unbroken: fg.Result, parts: Callable[[], fg.RunParts], tmp_path: Path) -> None:
    recorder = Recorder()
    result = fg.run(parts(), folder=tmp_path / "run", callbacks=[recorder])
    assert recorder.events == [
        "run_start",
        "initial_evaluation 0",
        "checkpoint 0",
        "training_start 0",
        "round_start 0",
        "round_end 1",
        "round_committed 1",
        "round_start 1",
        "evaluation 2",
        "round_end 2",
        "round_committed 2",
        "checkpoint 2",  # one of the best three that were measured
        "round_start 2",
        "evaluation 3",
        "round_end 3",
        "round_committed 3",
        "checkpoint 3",
        "run_end",
    ]
    assert same_bits(tensors_of(result.folder), tensors_of(unbroken.folder))


@pytest.mark.parametrize(("event", "round"), [("on_round_end", 1), ("on_round_end", 2), ("on_round_start", 1)])
def test_a_stopped_run_delivers_its_best_model_and_can_be_continued(
    event: str, round: int, unbroken: fg.Result, parts: Callable[[], fg.RunParts], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    recorder = Recorder()
    result = fg.run(parts(), folder=folder, callbacks=[StopAt(round, event), recorder])
    record = RunFolder.open(folder)
    assert (record.status, record.reason) == ("stopped", "StopAt: it is late")
    assert result.summary["rounds"] == round and result.summary["stopped"] == "StopAt: it is late"
    assert "stopped by StopAt: it is late" in repr(result)
    assert [line["round"] for line in record.metrics()] == [*range(round + 1)]
    assert result.evaluate().accuracy == result.summary["test"]["accuracy"]  # the best model is in the result
    assert recorder.events[-1] == "run_end" and f"round_committed {round}" in recorder.events  # seen behind the stop
    latest = checkpoint.load_latest(record.checkpoints)
    assert latest is not None and latest.round == round  # although none was due
    again = fg.run(parts(), folder=folder)
    assert (RunFolder.open(folder).status, RunFolder.open(folder).reason) == ("finished", "")
    assert "stopped" not in again.summary
    assert same_bits(tensors_of(folder), tensors_of(unbroken.folder))
    assert without_timing(list(again.metrics)) == without_timing(list(unbroken.metrics))


def test_a_stop_after_the_last_round_is_the_usual_end(parts: Callable[[], fg.RunParts], tmp_path: Path) -> None:
    result = fg.run(parts(), folder=tmp_path / "run", callbacks=[StopAt(3)])
    assert RunFolder.open(tmp_path / "run").status == "finished" and "stopped" not in result.summary


def test_a_final_stop_finishes_the_run(parts: Callable[[], fg.RunParts], tmp_path: Path) -> None:
    """As early stopping does; it also wins over a stop that could be continued."""
    callbacks = [StopAt(1), StopAt(1, final=True)]
    result = fg.run(parts(), folder=tmp_path / "run", callbacks=callbacks)
    assert RunFolder.open(tmp_path / "run").status == "finished"
    assert result.summary["rounds"] == 1 and "stopped" not in result.summary


def test_early_stopping_waits_for_its_evaluations() -> None:
    state: Any = None
    assert EarlyStopping(0).on_round_start(state, Best(stale=100)) is None
    assert EarlyStopping(3).on_round_start(state, Best(stale=2)) is None
    stop = EarlyStopping(3).on_round_start(state, Best(stale=3))
    assert stop is not None and stop.final


def test_an_error_in_a_callback_fails_the_run(parts: Callable[[], fg.RunParts], tmp_path: Path) -> None:
    class Broken(fg.Callback):
        def on_round_end(self, line: Mapping[str, Any], state: ServerState) -> None:
            raise ZeroDivisionError

    recorder = Recorder()
    with pytest.raises(ZeroDivisionError):
        fg.run(parts(), folder=tmp_path / "run", callbacks=[recorder, Broken()])
    assert recorder.events[-2:] == ["round_end 1", "run_interrupted"]
    assert RunFolder.open(tmp_path / "run").status == "failed"


def test_callbacks_are_refused_where_they_cannot_be_called(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text("")
    parts = fg.load(file, [*CONFIG, "engine=flower-sim"])
    with raises("E-RUN-CALLBACKS-ELSEWHERE", engine="flower-sim"):
        fg.run(parts, folder=tmp_path / "run", callbacks=[fg.Callback()])
    assert not (tmp_path / "run").exists()


def test_a_report_is_drawn_again_without_the_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing in a report follows from the secret, so a damaged one does not keep it from being drawn."""
    folder = tmp_path / "run"
    config = load(None, CONFIG)
    loop_module.run(config, folder, console=False)
    drawn = []
    monkeypatch.setattr(loop_module, "report_run", lambda record, setup: drawn.append(record.path))
    secret_path(folder).write_text("damaged")
    (folder / "report.html").unlink(missing_ok=True)
    summary = loop_module.run(config, folder, console=False)
    assert drawn == [folder] and summary == RunFolder.open(folder).summary()
    RunFolder.open(folder)._set_status("interrupted")
    with raises("E-RUN-SECRET-DAMAGED"):  # a run that goes on needs it
        loop_module.run(config, folder, console=False)


class InterruptInFinalizer(fg.Callback):
    """Presses Ctrl-C while a finalizer runs, where Python drops the KeyboardInterrupt."""

    def on_round_end(self, line: Mapping[str, Any], state: ServerState) -> None:
        class Finalized:
            def __del__(self) -> None:
                os.kill(os.getpid(), signal.SIGINT)

        Finalized()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_that_a_finalizer_swallows_ends_the_run_after_the_round(
    tmp_path: Path, parts: Callable[[], fg.RunParts], unbroken: fg.Result
) -> None:
    folder = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        fg.run(parts(), folder=folder, callbacks=[InterruptInFinalizer()])
    assert RunFolder.open(folder).status == "interrupted"
    latest = checkpoint.load_latest(folder / "checkpoints")
    assert latest is not None and latest.round == 1
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert same_bits(tensors_of(fg.run(parts(), folder=folder).folder), tensors_of(unbroken.folder))
