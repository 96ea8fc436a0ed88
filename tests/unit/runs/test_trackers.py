"""Trackers: they receive the numbers, are optional, and can never stop a run once it started."""

from __future__ import annotations

import importlib.util
import logging
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.support.errors import raises

from fedgraft.core.errors import FedgraftError
from fedgraft.runs.trackers import TRACKERS, TrackerCallback, numbers_of_line, tracker_named

CONFIG = {"algorithm": {"name": "fedavg", "lr": 0.1}, "rounds": 3}
LINE = {
    "round": 2,
    "accuracy": 0.5,
    "loss": None,
    "bytes_up": 10,
    "seconds": {"exchange": 0.25},
    "clients": {"ids": [1, 2], "loss": [1.0, 2.0]},
    "dropped": [{"client": 1, "reason": "late"}],
    "bad": float("nan"),
}
SUMMARY = {"test": {"accuracy": 0.625}, "best_round": 2, "note": "text"}


def has(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


class Recorder:
    """A tracker that notes its calls and fails where it is told to."""

    def __init__(self, fail: str = "", error: Exception | None = None) -> None:
        self.calls: list[str] = []
        self.fail = fail
        self.error = error or OSError("the network is gone\nsecond line")

    def _call(self, name: str) -> None:
        self.calls.append(name)
        if name == self.fail:
            raise self.error

    def start(self, config: Mapping[str, Any], name: str, after: int = 0) -> None:
        self._call("start")

    def log(self, round: int, metrics: Mapping[str, Any]) -> None:
        self._call("log")

    def finish(self, summary: Mapping[str, Any]) -> None:
        self._call("finish")


def follow(it: Any) -> None:
    it.start(CONFIG, "run")
    it.log(1, LINE)
    it.log(2, LINE)
    it.finish(SUMMARY)


def test_numbers_of_a_line() -> None:
    assert numbers_of_line(LINE) == {
        "accuracy": 0.5,
        "bytes_up": 10.0,
        "seconds.exchange": 0.25,
        "clients.loss.mean": 1.5,
        "dropped": 1.0,
    }


def test_by_name(tmp_path: Path) -> None:
    assert [tracker_named(name, tmp_path).name for name in TRACKERS] == ["tensorboard", "wandb", "mlflow"]
    assert list(tmp_path.iterdir()) == []
    with raises("E-RUN-TRACKER-NAME", tracker="comet"):
        tracker_named("comet", tmp_path)


@pytest.mark.parametrize(("fail", "calls"), [("log", ["start", "log"]), ("finish", ["start", "log", "log", "finish"])])
def test_failures_only_warn_and_only_once(fail: str, calls: list[str], caplog: pytest.LogCaptureFixture) -> None:
    inner = Recorder(fail)
    with caplog.at_level(logging.WARNING):
        follow(TrackerCallback(inner, "mine"))
    assert inner.calls == calls and len(caplog.records) == 1
    assert "'mine' failed" in caplog.text and "the network is gone" in caplog.text and "second" not in caplog.text


def test_without_care_the_same_failure_stops_the_run() -> None:
    """The planted bug: the same tracker used bare."""
    with pytest.raises(OSError, match="network"):
        follow(Recorder("log"))


def test_a_failing_start_is_one_sentence() -> None:
    with raises("E-RUN-TRACKER-START", tracker="mine") as caught:
        follow(TrackerCallback(Recorder("start"), "mine"))
    assert "(the network is gone)" in caught.value.message and "second line" not in caught.value.message
    with raises("E-MINE"):
        follow(TrackerCallback(Recorder("start", FedgraftError("E-MINE", "my own sentence")), "mine"))
    with pytest.raises(KeyboardInterrupt):  # Ctrl-C is not a tracker's failure
        follow(TrackerCallback(Recorder("log", KeyboardInterrupt()), "mine"))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", TRACKERS)
def test_a_missing_package_is_named(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (name, "torch.utils.tensorboard"):
        monkeypatch.setitem(sys.modules, module, None)
    with raises("E-MISSING-EXTRA", extra=name):
        tracker_named(name, tmp_path).start(CONFIG, "run")


@pytest.mark.slow
@pytest.mark.skipif(not has("tensorboard"), reason="tensorboard is not installed")
def test_tensorboard_holds_the_numbers(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the packages it imports
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        follow(tracker_named("tensorboard", tmp_path))
        again = tracker_named("tensorboard", tmp_path)
        again.start(CONFIG, "run", after=1)  # round 2 is run again and must not be there twice
        again.log(2, {**LINE, "accuracy": 0.75})
        again.finish({})
        events = EventAccumulator(str(tmp_path / "tensorboard"))
        events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("accuracy")] == [(1, 0.5), (2, 0.75)]
    assert events.Scalars("clients/loss/mean")[0].value == 1.5 and "loss" not in events.Tags()["scalars"]
    assert events.Scalars("final/test.accuracy")[0].value == 0.625


@pytest.mark.slow
@pytest.mark.skipif(not has("wandb"), reason="wandb is not installed")
def test_wandb_works_offline(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.delenv("WANDB_MODE", raising=False)
    for variable in ("WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(variable, str(tmp_path / "home"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import wandb

        it = tracker_named("wandb", tmp_path)
        follow(it)
        wandb.teardown()  # its writer is another process, which this ends as the end of a program would
    assert not caplog.records
    (record,) = (tmp_path / "wandb").glob("offline-run-*/*.wandb")
    written = record.read_bytes()
    assert b"clients.loss.mean" in written and b"test.accuracy" in written and b"fedavg" in written
    assert "wandb:" not in "".join(capfd.readouterr())


@pytest.mark.slow
@pytest.mark.skipif(not has("mlflow"), reason="mlflow is not installed")
def test_mlflow_keeps_a_local_database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not has("sqlalchemy"):
        pytest.skip("mlflow is installed without its database packages")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        it = tracker_named("mlflow", tmp_path)
        follow(it)
        client, run = it.tracker.client, it.tracker.run  # type: ignore[attr-defined]
        history = client.get_metric_history(run, "accuracy")
    assert [(metric.step, metric.value) for metric in history] == [(1, 0.5), (2, 0.5)]
    assert client.get_run(run).data.params["algorithm.lr"] == "0.1" and (tmp_path / "mlflow.db").is_file()


class FakeClient:
    """The few calls of MLflow's client that are used, noted."""

    calls: list[tuple[Any, ...]] = []  # noqa: RUF012

    def __init__(self, tracking_uri: str) -> None:
        self.calls.clear()
        self.calls.append(("uri", tracking_uri))

    def get_experiment_by_name(self, name: str) -> None:
        return None

    def create_experiment(self, name: str) -> str:
        return "7"

    def create_run(self, experiment: str, run_name: str, tags: dict[str, str]) -> Any:
        self.calls.append(("run", experiment, run_name, tags))
        return type("Run", (), {"info": type("Info", (), {"run_id": "r"})})

    def log_param(self, run: str, key: str, value: str) -> None:
        self.calls.append(("param", run, key, value))

    def log_metric(self, run: str, key: str, value: float, step: int | None = None) -> None:
        self.calls.append(("metric", run, key, value, step))

    def set_terminated(self, run: str, status: str) -> None:
        self.calls.append(("end", run, status))


def test_mlflow_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where MLflow is not installed: what is sent, and to which address."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "somewhere")
    monkeypatch.setitem(sys.modules, "mlflow", type("Module", (), {"MlflowClient": FakeClient}))
    follow(tracker_named("mlflow", tmp_path))
    calls = FakeClient.calls
    assert calls[0] == ("uri", "somewhere") and ("run", "7", "run", {"resumed_after": "0"}) in calls
    assert ("param", "r", "algorithm.lr", "0.1") in calls and ("metric", "r", "accuracy", 0.5, 2) in calls
    assert ("metric", "r", "final.test.accuracy", 0.625, None) in calls and calls[-1] == ("end", "r", "FINISHED")


def test_a_tracker_that_never_started_is_not_closed() -> None:
    """The second tracker of a run could not start: it is told nothing more, and the first one is closed."""
    first, second = TrackerCallback(Recorder(), "first"), TrackerCallback(Recorder("start"), "second")
    first.start(CONFIG, "run")
    with raises("E-RUN-TRACKER-START"):
        second.start(CONFIG, "run")
    for callback in (first, second):
        callback.on_run_interrupted()
    assert first.tracker.calls == ["start", "finish"] and second.tracker.calls == ["start"]  # type: ignore[attr-defined]
