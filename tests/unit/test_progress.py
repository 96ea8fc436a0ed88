"""Phases: told by time, from workers too, never more than they are; a display, a log and a file make lines of them."""

from __future__ import annotations

import io
import logging
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from rich.console import Console

from fedgraft.client.actions import progress_label
from fedgraft.core import progress
from fedgraft.core.messages import Request
from fedgraft.core.progress import (
    Phase,
    counted,
    describe_facts,
    open_phases,
    phase,
    requests_phase,
    shown_by,
    watching,
)
from fedgraft.engines.shared_memory import Workers
from fedgraft.report.display import LiveProgress
from fedgraft.report.run_record import current_phases
from fedgraft.runs.tracking import PhaseFile, PhaseLog


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "EVERY", 0.01)


def lasted(seconds: float, **facts: object) -> Phase:
    """A phase that began so long ago."""
    one = Phase("features", 1000, "images", **facts)  # type: ignore[arg-type]
    one.began -= seconds
    return one


def test_a_phase_is_open_as_long_as_its_block() -> None:
    with phase("outer"), pytest.raises(ValueError, match="x"), phase("inner", 3, "things") as inner:
        inner.advance(2)
        assert [one.name for one in open_phases()] == ["outer", "inner"] and inner.done == 2
        raise ValueError("x")
    assert open_phases() == [] and inner.ended is not None


def test_items_are_counted_and_an_abandoned_count_is_closed() -> None:
    items = counted("items", [1, 2, 3], unit="things")
    assert next(items) == 1 and open_phases()[0].total == 3
    assert list(items) == [2, 3] and open_phases() == []
    half = counted("items", iter(range(9)), 9)
    next(half)
    half.close()  # type: ignore[attr-defined]
    assert open_phases() == []


def test_the_line_says_what_how_far_how_quick_and_how_long() -> None:
    one = lasted(10)
    one.advance(400)
    assert str(one).startswith("features: 400 of 1,000 images, 40 a second, about 15 s left")
    one.growing = True
    assert str(one) == "features: 400 of 1,000 images, 40 a second, 10 s so far"
    slow = {"what": "round 1", "unit": "clients", "done": 1, "total": 10, "rate": 0.01, "seconds": 100.0, "left": 900.0}
    assert describe_facts(slow) == "round 1: 1 of 10 clients, 1 min 40 s each, about 15 min 00 s left"
    assert str(Phase("export")) == "export: 0 s so far"


def until(seen: Callable[[], bool]) -> None:
    """Wait for a watcher: on a busy machine its turn may come late."""
    for _ in range(1000):
        if seen():
            return
        time.sleep(0.01)


def test_watchers_look_by_time_and_once_more_at_the_end(quick: None) -> None:
    seen: list[list[str]] = []
    with watching(lambda phases: seen.append([one.name for one in phases])), phase("a"):
        until(lambda: ["a"] in seen)
    assert ["a"] in seen and seen[-1] == []
    count = len(seen)
    time.sleep(0.05)
    assert len(seen) == count  # nobody looks any more


def test_the_terminal_has_one_owner(quick: None) -> None:
    first: list[int] = []
    second: list[int] = []
    with shown_by(lambda p: first.append(len(p))), phase("a"):
        with shown_by(lambda p: second.append(len(p))):
            before = len(first)
            until(lambda: 1 in second)
            assert len(first) == before and 1 in second
        until(lambda: first[-1:] == [1])
        assert first[-1] == 1 and second[-1] == 0


def test_phases_of_workers_are_told_here_and_added_up(quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    seen: list[Phase] = []

    def work(parts: Sequence[memoryview]) -> list[bytes]:
        assert open_phases() == []  # a fork begins with none of its parent's
        with phase("digging", 5, "holes") as one:
            for _ in range(5):
                time.sleep(0.02)
                one.advance()
        return [bytes(parts[0])]

    def watch(phases: Sequence[Phase]) -> None:
        seen.extend(phases)

    with watching(watch), phase("outer"), Workers(work, 2) as team:
        found = team.map([b"a", b"b", b"c"], lambda t: [t], lambda t, parts: bytes(parts[0]), str)
    assert found == [b"a", b"b", b"c"]
    merged = {id(one): one for one in seen if one.name == "digging"}
    assert len(merged) == 1  # one phase for all workers
    (one,) = merged.values()
    assert one.done == one.total == 15 and one.growing and one.left is None and one.ended is not None


def test_of_a_short_task_a_worker_says_nothing() -> None:
    sent: list[progress.News] = []
    relay = progress.Relay(sent.append)
    relay.note(Phase("x", unit="y"), 1, 2)
    relay.finish_task()
    assert sent == []
    relay.last -= 10
    relay.note(Phase("x", unit="y"), 1, 2)
    relay.note(Phase("x", unit="y"), 1, 0)
    relay.finish_task()
    assert sent == [[("x", "y", 1, 2)], [("x", "y", 1, 0)]]


@pytest.mark.parametrize(
    ("action", "settings", "name"),
    [
        ("train", {}, "round 3"),
        ("statistics", {}, "head initialisation: sums over the features"),
        ("fisher_scores", {}, "mask calibration: scores"),
        ("evaluate", {}, "evaluation by the clients"),
        ("secure.masked", {"sums": "train"}, "round 3, secure sum: masked"),
        ("secure.keys", {"sums": "statistics"}, "head initialisation: sums over the features, secure sum: keys"),
    ],
)
def test_phases_have_truthful_names(action: str, settings: dict[str, str], name: str) -> None:
    requests = [Request("r", 2, k, action, settings=settings) for k in range(4)]
    with requests_phase(requests, progress_label) as one:
        assert (one.name, one.total, one.unit) == (name, 4, "clients")


def test_the_log_has_begin_half_minutes_and_end(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "fedgraft.phases")
    log, long, minor = PhaseLog(), lasted(2.5), lasted(2.5, minor=True)
    for _ in range(3):
        log([long, minor, lasted(0.5)])
    assert len(caplog.messages) == 1 and "features: 0 of 1,000" in caplog.messages[0]
    long.began -= 30
    minor.began -= 30
    log([long, minor])
    assert len(caplog.messages) == 3
    long.ended = long.began + 40
    log([])
    assert caplog.messages[3:] == ["features took 40.0 s, 0 images"]


def test_the_file_says_what_lasts_and_is_gone_at_the_end(tmp_path: Path) -> None:
    file = PhaseFile(tmp_path)
    file([lasted(0.2)])
    assert current_phases(tmp_path) == [] and not list(tmp_path.iterdir())
    file([lasted(5)])
    assert current_phases(tmp_path) == ["features: 0 of 1,000 images, 5 s so far"]
    old = (tmp_path / "now.json").read_text().replace('"time": ', '"time": -')
    (tmp_path / "now.json").write_text(old)
    assert current_phases(tmp_path) == []  # what a killed run left behind is not the present
    file([])
    assert not list(tmp_path.iterdir())


def plain(width: int = 100) -> tuple[LiveProgress, io.StringIO]:
    text = io.StringIO()
    return LiveProgress(Console(file=text, width=width)), text


def test_plain_lines_come_after_two_seconds_and_then_now_and_then() -> None:
    display, text = plain()
    one = lasted(1.5)
    display.look([one])
    assert text.getvalue() == ""
    for age in (2.1, 3.0, 6.0, 7.2):
        one.began = time.monotonic() - age
        display.look([one])
    lines = text.getvalue().splitlines()
    assert len(lines) == 2 and lines[0] == "features: 0 of 1,000 images, 2 s so far"


def test_plain_rounds_are_told_by_time_and_the_last_always() -> None:
    display, text = plain()
    with display:
        display.start(20, 0, "twenty rounds")
        for number in range(1, 20):
            display.update({"round": number, "train_loss": 1.0, "accuracy": 0.5})
            display.look([])
    assert text.getvalue().splitlines() == ["twenty rounds", "round 19 of 20, loss 1.000, val 50.00 %"]


def test_a_terminal_shows_bars_and_lets_go() -> None:
    text = io.StringIO()
    console = Console(file=text, force_terminal=True, width=100)
    with LiveProgress(console) as display:
        display.look([lasted(3)])
        assert "features" in text.getvalue()
        display.look([])
        with LiveProgress(console) as other:  # only one may be live: the first must have stopped
            other.start(3, 0, "three")
            other.update({"round": 1})
            other.look([lasted(3)])
    assert "round" in text.getvalue() and os.linesep in text.getvalue()


def test_whoever_prints_after_the_last_phase_finds_the_terminal_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bar that stays until the next look would have the answer behind it on its line."""
    monkeypatch.setattr(progress, "EVERY", 0.2)
    seen: list[int] = []
    with progress.shown_by(lambda phases: seen.append(len(phases))):
        with progress.phase("loading"):
            time.sleep(0.3)
        assert seen and seen[-1] == 0
