"""The run folder: whose it is, what a kill leaves, and that a resumed run's metrics equal an unbroken one's."""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.errors import raises

from fedgraft.core.files import json_ready, read_metrics, without_timing
from fedgraft.report.run_index import list_runs
from fedgraft.report.run_record import describe_run
from fedgraft.runs import checkpoint, environment
from fedgraft.runs.checkpoint import load_latest
from fedgraft.runs.folder import RunFolder


def line(round: int, **more: Any) -> dict[str, Any]:
    return {"round": round, "accuracy": round / 10, "bytes_up": 10, "bytes_down": 5, "seconds": {"a": 0.5}, **more}


def train(run: RunFolder, until: int, stop_at: int | None = None, every: int = 3) -> None:
    """A run in miniature: the state is the sum of the rounds; it stops short like a kill would."""
    latest = run.resume()
    total = torch.zeros(()) if latest is None else latest.tensors["total"]
    for round in range(1 if latest is None else latest.round + 1, until + 1):
        total = total + round
        run.append(line(round, total=float(total), seconds={"a": torch.rand(()).item()}))
        if stop_at == round:
            return
        if round % every == 0:
            run.save_checkpoint(round, {"total": total}, {}, best=round / 10)
    run.finish({"rounds": until, "test": {"accuracy": 0.5}})


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return RunFolder.create(tmp_path / "run", "rounds = 10\n", "digest")


def test_layout_and_reading_back(run: RunFolder) -> None:
    with run.writing(console=False):
        assert run.status == "running"
        train(run, 10)
    again = RunFolder.open(run.path)
    assert again.config_text == "rounds = 10\n" and again.config_digest == "digest" and again.status == "finished"
    assert again.summary()["test"]["accuracy"] == 0.5 and [m["round"] for m in again.metrics()] == list(range(1, 11))
    names = {path.name for path in run.path.iterdir()}
    assert names == {
        ".lock",
        "run.json",
        "config.toml",
        "metrics.jsonl",
        "log.txt",
        "environment.json",
        "summary.json",
        "checkpoints",
        "figures",
    }
    last = load_latest(again.checkpoints, again.config_digest)
    assert last is not None and last.round == 9 and last.meta["config_digest"] == "digest"


def test_same_config_opens_and_another_is_refused(run: RunFolder) -> None:
    assert RunFolder.create(run.path, "rounds = 10\n", "digest").config_digest == "digest"
    with raises("E-RUN-FOLDER-FOREIGN"):
        RunFolder.create(run.path, "rounds = 11\n", "other")
    assert run.config_text == "rounds = 10\n"


def test_foreign_folders_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    with raises("E-RUN-FOLDER-TAKEN"):
        RunFolder.create(tmp_path, "", "digest")
    with raises("E-REPORT-NO-RUN"):
        RunFolder.open(tmp_path)


def test_a_kill_during_create_can_be_repeated(tmp_path: Path) -> None:
    for name in (".lock", "config.toml", ".run.json.tmp"):
        (tmp_path / name).write_text("half")
    assert RunFolder.create(tmp_path, "a = 1\n", "digest").config_text == "a = 1\n"


def test_writing_needs_the_lock(run: RunFolder) -> None:
    with raises("E-RUN-FOLDER-CLOSED"):
        run.append(line(1))
    with (
        run.writing(console=False),
        raises("E-RUN-FOLDER-IN-USE", process=str(os.getpid())),
        RunFolder(run.path).writing(console=False),
    ):
        pass


@pytest.mark.slow
def test_a_second_process_is_kept_out_and_a_killed_one_frees_the_folder(run: RunFolder) -> None:
    script = (
        "import sys, time\nfrom fedgraft.runs.folder import RunFolder\nrun = RunFolder.open(sys.argv[1])\n"
        "with run.writing(console=False):\n    run.append({'round': 1})\n"
        "    print('in', flush=True)\n    time.sleep(60)\n"
    )
    child = subprocess.Popen([sys.executable, "-c", script, str(run.path)], stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None and child.stdout.readline() == "in\n"
        assert run.status == "running"
        with raises("E-RUN-FOLDER-IN-USE", process=str(child.pid)), run.writing(console=False):
            pass
    finally:
        child.send_signal(signal.SIGKILL)
        child.communicate()
    assert run.status == "interrupted" and run.metrics() == [{"round": 1}]
    with run.writing(console=False):
        assert run.status == "running"


@pytest.mark.slow
@pytest.mark.parametrize("stop_at", [1, 3, 4, 8, 10])
def test_resumed_metrics_equal_an_unbroken_run(tmp_path: Path, stop_at: int) -> None:
    whole, broken = (RunFolder.create(tmp_path / name, "", "digest") for name in ("whole", "broken"))
    with whole.writing(console=False):
        train(whole, 10)
    with broken.writing(console=False):
        train(broken, 10, stop_at)
    assert broken.status == "interrupted"
    with broken.metrics_path.open("ab") as file:
        file.write(b'{"round": 99, "acc')  # a kill in the middle of a write
    assert len(broken.metrics()) == stop_at
    with broken.writing(console=False):
        train(broken, 10)
    assert without_timing(broken.metrics()) == without_timing(whole.metrics())
    assert broken.metrics() != whole.metrics()  # times do differ: the comparison looked at two runs


def test_without_rewinding_the_comparison_fails(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted bug: a resume that keeps the lines after the checkpoint repeats rounds."""
    monkeypatch.setattr(RunFolder, "rewind", lambda self, round: None)
    with run.writing(console=False):
        train(run, 10, stop_at=5)
    with run.writing(console=False):
        train(run, 10)
    assert [m["round"] for m in run.metrics()] == [1, 2, 3, 4, 5, 4, 5, 6, 7, 8, 9, 10]


def test_a_torn_line_is_cut_before_the_next_is_written(run: RunFolder) -> None:
    run.metrics_path.write_bytes(b'{"round":1}\n{"round":2,"accu')
    with run.writing(console=False):
        run.append({"round": 2})
    assert run.metrics() == [{"round": 1}, {"round": 2}]


def test_a_damaged_line_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"round":1}\nrubbish\n7\n{"round":2}\n')
    assert read_metrics(tmp_path) == [{"round": 1}, {"round": 2}]
    assert "line 2" in caplog.text and "line 3" in caplog.text
    assert read_metrics(tmp_path / "none.jsonl") == []


def test_damaged_state_file_is_one_sentence(run: RunFolder) -> None:
    (run.path / "run.json").write_text("{")
    with raises("E-REPORT-DAMAGED-JSON"):
        _ = run.status


def test_numbers_become_plain_json(run: RunFolder) -> None:
    with run.writing(console=False):
        run.append(
            {"round": 1, "loss": float("nan"), "t": torch.tensor([1.0, float("inf")]), "ids": (1, 2), "p": Path("x")}
        )
    text = run.metrics_path.read_text()
    assert json.loads(text, parse_constant=lambda name: pytest.fail(name)) == {
        "round": 1,
        "loss": None,
        "t": [1.0, None],
        "ids": [1, 2],
        "p": "x",
    }
    assert json_ready({3: True, "n": None}) == {"3": True, "n": None}


def test_full_disk_is_one_sentence(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    original = os.write

    def full(descriptor: int, data: Any) -> int:
        original(descriptor, memoryview(data)[:3])
        raise OSError(errno.ENOSPC, "No space left on device")

    with run.writing(console=False):
        run.append(line(1))
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", full)
            with raises("E-RUN-METRICS-WRITE"):
                run.append(line(2))
            with raises("E-CORE-WRITE", path=str(run.path / "summary.json")):
                run.finish({})
            with raises("E-CORE-WRITE", path=str(run.metrics_path)):
                run.rewind(1)
        run.append(line(2))
    assert [m["round"] for m in run.metrics()] == [1, 2]


def test_metrics_reach_the_disk_before_the_checkpoint(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[str] = []
    monkeypatch.setattr(run, "sync", lambda: steps.append("metrics"))
    monkeypatch.setattr(checkpoint, "save", lambda *a, **k: steps.append("checkpoint"))
    run.save_checkpoint(1, {}, {})
    assert steps == ["metrics", "checkpoint"]


def test_how_a_run_ended(run: RunFolder) -> None:
    with pytest.raises(KeyboardInterrupt), run.writing(console=False):
        raise KeyboardInterrupt
    assert run.status == "interrupted"
    with pytest.raises(ValueError, match="boom"), run.writing(console=False):
        raise ValueError("boom")
    assert run.status == "failed" and run.reason == "ValueError: boom"
    assert "Traceback" in (run.path / "log.txt").read_text()
    with run.writing(console=False):
        run.finish({})
    assert run.status == "finished" and run.reason == ""


def test_log_format(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    logger = logging.getLogger("fedgraft.somewhere")
    with run.writing(console=True):
        logger.info("hello %s", "[bold]you[/bold]")
        logger.warning("careful")
    logger.warning("after the run")
    text = (run.path / "log.txt").read_text().splitlines()
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} \| INFO \| hello \[bold\]you\[/bold\]", text[0])
    assert text[1].endswith("| WARNING | careful") and len(text) == 2
    assert logging.getLogger("fedgraft").handlers == [] and "careful" in capsys.readouterr().out


def test_environment_and_a_change_of_it(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    with run.writing(console=False):
        pass
    first = run.environment()
    assert first["packages"]["torch"] == torch.__version__ and first["threads"] == torch.get_num_threads()
    with run.writing(console=False):
        pass
    assert "another environment" not in (run.path / "log.txt").read_text()
    changed = {**environment.machine_facts(), "threads": 999, "packages": {**first["packages"], "numpy": "0.1"}}
    monkeypatch.setattr(environment, "machine_facts", lambda: changed)
    with run.writing(console=False):
        pass
    warning = (run.path / "log.txt").read_text()
    assert "-> 999" in warning and f"numpy {first['packages']['numpy']} -> 0.1" in warning
    assert run.environment()["started"] == first["started"] and len(run.environment()["resumed"]) == 2


def test_environment_outside_a_checkout(tmp_path: Path) -> None:
    (tmp_path / "__init__.py").write_text("")
    assert environment.revision(tmp_path) is None and environment.installed("no-such-package") is None
    assert environment.processor(tmp_path / "none") and environment.machine_facts()["command"] == sys.argv


def test_listing(tmp_path: Path) -> None:
    done, stopped = RunFolder.create(tmp_path / "b", "", "1"), RunFolder.create(tmp_path / "sweep" / "a", "", "2")
    with done.writing(console=False):
        train(done, 4)
    with stopped.writing(console=False):
        stopped.append({"round": 1, "accuracy": None})
    (tmp_path / "notes").mkdir()
    first, second = list_runs(tmp_path)
    assert (first.name, first.status, first.round, first.best, first.test) == ("b", "finished", 4, 0.4, 0.5)
    assert first.bytes == 60 and first.seconds > 0 and first.config_digest == "1"
    assert (second.name, second.status, second.best, second.test) == ("sweep/a", "interrupted", None, None)
    assert list_runs(tmp_path / "nowhere") == [] and describe_run(done) == describe_run(done, done.metrics())


def test_one_damaged_run_does_not_hide_the_others(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("a", "b"):
        RunFolder.create(tmp_path / name, "", name)
    (tmp_path / "a" / "run.json").write_text("{")
    assert [info.name for info in list_runs(tmp_path)] == ["b"] and "not JSON" in caplog.text
