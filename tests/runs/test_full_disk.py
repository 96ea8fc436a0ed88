"""A deadline the chosen engine cannot keep is warned of; a full disk is one sentence, and resuming heals it."""

from __future__ import annotations

import json
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from safetensors import SafetensorError
from tests.support.errors import raises

from fedgraft.config.load import Config, load, read_toml
from fedgraft.core.errors import FedgraftError
from fedgraft.core.files import read_metrics, without_timing
from fedgraft.core.store import write_cached
from fedgraft.models.export import atomic_folder
from fedgraft.models.folders import read_json
from fedgraft.report import run_page as report
from fedgraft.runs import loop as running
from fedgraft.runs import reporting
from fedgraft.runs.engines import Engines
from fedgraft.runs.folder import RunFolder
from fedgraft.runs.open_run import open_run
from fedgraft.runs.round_log import verify_log
from fedgraft.runs.setup import setup_of
from fedgraft.runs.warnings import warnings_for

# ---- a deadline that cannot be kept ---------------------------------------------------------------------------------

SMALL = [
    "model.name=tiny",
    "data.image_size=16",
    "data.limit=60",
    "partition.clients=3",
    "rounds.total=2",
    "model.head=random",
    "local.steps=1",
    "rounds.checkpoint_every=1",
    "rounds.evaluate_every=1",
]


@pytest.mark.parametrize(
    ("overrides", "warns"),
    [
        (["engine=reference", "workers=2"], False),
        (["engine=reference", "workers=1"], True),
        (["engine=auto", "workers=2", "trainable.kind=head"], True),  # kept features: batched, whatever the workers
    ],
)
def test_a_deadline_is_warned_of_by_the_engine_really_chosen(
    overrides: list[str], warns: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDGRAFT_CACHE", str(tmp_path))
    for late, expected in ((["rounds.deadline=5"], warns), ([], False)):
        setup = setup_of(load(None, [*SMALL, *overrides, *late]))
        engines = Engines(setup)
        warnings = warnings_for(setup, open_run(setup, engines), engines)
        assert any("cannot be late" in text for text in warnings) == expected


# ---- a place that cannot be written to ------------------------------------------------------------------------------


def test_a_place_that_cannot_be_written_to_is_refused_before_anything_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build() -> Any:
        raise AssertionError("the job was built first")

    (tmp_path / "taken").write_text("a file")
    with raises("E-CORE-FOLDER"):
        running.run(load(None, SMALL), tmp_path / "taken" / "runs" / "x", console=False, build=build)
    monkeypatch.setattr("fedgraft.core.files.os.access", lambda *_: False)  # as in a folder of somebody else
    with raises("E-CORE-FOLDER"):
        running.run(load(None, SMALL), tmp_path / "runs" / "x", console=False, build=build)
    assert not (tmp_path / "runs").exists()


# ---- a full disk ----------------------------------------------------------------------------------------------------


@contextmanager
def full_disk(room: int = 0) -> Iterator[None]:
    """No file of this process grows beyond so many bytes: the kernel refuses, as it does on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def fills(original: Callable[..., Any], room: int = 0, call: int = 1) -> Callable[..., Any]:
    """The function, with the disk full during its n-th call and until the run has ended."""
    calls = 0

    def filled(*args: Any, **overrides: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call:
            resource.setrlimit(resource.RLIMIT_FSIZE, (room, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
        return original(*args, **overrides)

    return filled


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    """An unbroken run's folder and what it leaves: metrics and test result."""
    folder = tmp_path_factory.mktemp("unbroken") / "run"
    return folder, left(running.run(load(None, SMALL), folder, console=False), folder)


@pytest.fixture
def small(tmp_path: Path, unbroken: tuple[Path, list[Any]]) -> tuple[Config, Path, list[Any]]:
    """A config, a folder, and what an unbroken run of it leaves."""
    return load(None, SMALL), tmp_path, unbroken[1]


def left(summary: dict[str, Any], folder: Path) -> list[Any]:
    return [without_timing(read_metrics(folder)), summary["test"], (folder / "report.html").exists()]


PLACES: dict[str, tuple[Any, str, int, int, str]] = {
    "metrics": (RunFolder, "append", 0, 3, "E-RUN-METRICS-WRITE"),
    "half the first line": (RunFolder, "append", 40, 1, "E-RUN-METRICS-WRITE"),
    "half a round's line": (RunFolder, "append", 200, 2, "E-RUN-METRICS-WRITE"),
    "first checkpoint": (RunFolder, "save_checkpoint", 500, 1, "E-RUN-CHECKPOINT-WRITE"),
    "last checkpoint": (RunFolder, "save_checkpoint", 500, 3, "E-RUN-CHECKPOINT-WRITE"),
    "results": (RunFolder, "finish", 0, 1, "E-CORE-WRITE"),
    "report": (reporting, "write_report", 100, 1, "E-RUN-REPORT-WRITE"),
}


@pytest.mark.parametrize("context", PLACES)
def test_a_full_disk_is_one_sentence_and_resuming_ends_as_if_nothing_had_been(
    context: str,
    small: tuple[Config, Path, list[Any]],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    config, root, unbroken = small
    owner, name, room, call, code = PLACES[context]
    with monkeypatch.context() as patch, full_disk(resource.RLIM_INFINITY):
        patch.setattr(owner, name, fills(getattr(owner, name), room, call))
        with raises(code):
            running.run(config, root / "run", console=False)
    assert "Traceback" not in capfd.readouterr().err
    assert running.is_finished(root / "run") == (context == "report")
    assert not (root / "run" / "report.html").exists()
    assert (root / "run" / "metrics.jsonl").read_bytes()[-1:] in {b"", b"\n"}  # no line is left torn
    assert left(running.run(config, root / "run", console=False), root / "run") == unbroken


def test_a_report_written_in_place_would_stay_torn(
    small: tuple[Config, Path, list[Any]], unbroken: tuple[Path, list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The planted mistake: half a page that looks like one."""
    config, root, _ = small
    monkeypatch.setattr(report, "write_atomic", lambda path, chunks: path.write_bytes(b"".join(chunks)))
    with monkeypatch.context() as patch, full_disk(resource.RLIM_INFINITY):
        patch.setattr(reporting, "write_report", fills(reporting.write_report, 100))
        with pytest.raises(FedgraftError):
            running.run(config, root / "run", console=False)
    running.run(config, root / "run", console=False)
    assert (root / "run" / "report.html").stat().st_size < (unbroken[0] / "report.html").stat().st_size


def test_what_is_kept_for_other_runs_is_whole_or_not_there(tmp_path: Path) -> None:
    path = tmp_path / "heads" / "one.safetensors"
    write_cached(path, [b"good"])
    with full_disk(2), raises("E-CORE-WRITE", path=str(path)):
        write_cached(path, [b"better"])
    assert [p.name for p in path.parent.iterdir()] == ["one.safetensors"] and path.read_bytes() == b"good"
    with full_disk(2), pytest.raises(OSError):
        path.write_bytes(b"better")  # the planted mistake: written in place
    assert path.read_bytes() == b"be"


# ---- exports, folders that cannot be made, files nested too deeply ---------------------------------------------------


def test_an_export_to_a_full_disk_is_one_sentence_and_leaves_nothing(tmp_path: Path) -> None:
    """safetensors' own error names no file and is no OSError: it came out as a traceback."""
    import torch
    from safetensors.torch import save_file

    def fill(made: Path) -> None:
        with full_disk(100):
            save_file({"weight": torch.zeros(1000)}, made / "model.safetensors")

    with raises("E-MODELS-EXPORT-WRITE"), atomic_folder(tmp_path / "out") as made:
        fill(made)
    assert not list(tmp_path.iterdir())
    with pytest.raises(SafetensorError):  # without the guard
        fill(tmp_path)


def test_a_run_folder_that_cannot_be_made_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with raises("E-CORE-FOLDER"):
        RunFolder.create(tmp_path / "file" / "run", "", "")
    with pytest.raises(OSError, match="directory"):  # without the guard
        (tmp_path / "file" / "run").mkdir(parents=True)


def test_files_nested_too_deeply_are_refused_with_a_sentence(tmp_path: Path) -> None:
    deep = "[" * 100_000
    with pytest.raises(RecursionError):  # without the guards
        json.loads(deep)
    (tmp_path / "config.json").write_text(deep)
    (tmp_path / "mine.toml").write_text(f"x = {deep}")
    (tmp_path / "run.json").write_text(deep)
    (tmp_path / "rounds.log").write_text(deep)
    with raises("E-MODELS-JSON"):
        read_json(tmp_path / "config.json")
    with pytest.raises(FedgraftError, match="not valid TOML"):
        read_toml(tmp_path / "mine.toml")
    with raises("E-REPORT-DAMAGED-JSON"):
        _ = RunFolder.open(tmp_path).status
    with raises("E-RUN-LOG-READ"):
        verify_log(tmp_path)
    (tmp_path / "images.zip").write_bytes(b"PK\x03\x04\x80\xff")
    with pytest.raises(FedgraftError, match="must be unpacked"):
        read_toml(tmp_path / "images.zip")
