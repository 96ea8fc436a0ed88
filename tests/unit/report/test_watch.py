"""`fedgraft watch`: what one frame shows, what a curve is drawn from, and when the view ends."""

from __future__ import annotations

import io
import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from tests.support.errors import raises

from fedgraft.config.load import load, to_toml
from fedgraft.report.watch import braille, frame, last_losses, time_left, watch_run
from fedgraft.runs.folder import RunFolder

OVERRIDES = ["model.name=tiny", "data.image_size=16", "rounds.total=8", "name=seen"]


def line(number: int, **more: Any) -> dict[str, Any]:
    """One round of a made-up run."""
    return {
        "round": number,
        "train_loss": 2.0 / number,
        "bytes_up": 1000,
        "bytes_down": 3000,
        "seconds": {"exchange": 1.5, "combine": 0.5},
        **more,
    }


def made(path: Path, lines: list[dict[str, Any]], **state: Any) -> RunFolder:
    """A run folder with these rounds, made of files alone."""
    config = load(None, OVERRIDES)
    run = RunFolder.create(path, to_toml(config), config.digest)
    run.metrics_path.write_text("".join(json.dumps(one) + "\n" for one in lines))
    summary = state.pop("summary", None)
    if summary:
        (path / "summary.json").write_text(json.dumps(summary))
    (path / "run.json").write_text(json.dumps({"config_digest": config.digest, **state}))
    return run


def shown(run: RunFolder, width: int = 80) -> str:
    text = io.StringIO()
    Console(file=text, width=width).print(frame(run, width))
    return text.getvalue().replace("\u00a0", " ")  # which keeps a client and its loss on one line


def rows_lit(drawn: list[str], column: int) -> list[int]:
    """Heights, from below, of the dots lit in one column of dots, read back from the characters."""
    bits = (0x01, 0x02, 0x04, 0x40) if column % 2 == 0 else (0x08, 0x10, 0x20, 0x80)
    height = 4 * len(drawn)
    cells = [ord(row[column // 2]) - 0x2800 for row in drawn]
    return [height - 1 - (4 * i + k) for i, cell in enumerate(cells) for k, bit in enumerate(bits) if cell & bit]


def test_a_rising_line_goes_from_the_lower_left_to_the_upper_right() -> None:
    drawn = braille([0.0, 1.0], 8, 4)
    assert [len(row) for row in drawn] == [8] * 4
    assert 0 in rows_lit(drawn, 0) and 15 in rows_lit(drawn, 15)
    tops = [max(rows_lit(drawn, column)) for column in range(16)]
    assert tops == sorted(tops) == list(range(16))


def test_a_falling_line_is_the_mirror_image() -> None:
    up, down = braille([0.0, 1.0], 8, 4), braille([1.0, 0.0], 8, 4)
    assert [max(rows_lit(up, c)) for c in range(16)] == [min(rows_lit(down, 15 - c)) for c in range(16)]
    assert up != down


@given(st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=300), st.integers(1, 30), st.integers(1, 6))
def test_every_column_has_a_dot_and_the_line_has_no_gap(values: list[float], width: int, height: int) -> None:
    drawn = braille(values, width, height)
    assert len(drawn) == height and {len(row) for row in drawn} == {width}
    before: list[int] = []
    for column in range(2 * width):
        lit = sorted(rows_lit(drawn, column))
        assert lit == list(range(lit[0], lit[-1] + 1))
        assert not before or set(before) & set(lit)  # joined to the column on its left
        before = lit


def test_flat_and_single_values_are_drawn_in_the_middle() -> None:
    assert rows_lit(braille([3.0, 3.0], 4, 4), 0) == [8]
    assert rows_lit(braille([3.0], 4, 4), 0) == [8]


def test_many_values_are_averaged_not_skipped() -> None:
    spike = np.zeros(4000)
    spike[2001] = 1.0  # falls between any stride of 100
    assert max(rows_lit(braille(spike.tolist(), 20, 4), 20)) == 15


def test_losses_are_the_newest_of_each_client() -> None:
    lines = [
        {"clients": {"ids": [1, 2], "loss": [0.5, 0.6]}},
        {"clients": {"ids": [2, 3], "loss": [0.1, None]}},
        {"skipped": True},
    ]
    assert last_losses(lines) == {1: 0.5, 2: 0.1}


def test_time_left_is_the_recent_pace_times_the_rounds_to_come() -> None:
    slow = [line(n, seconds={"exchange": 100.0}) for n in range(1, 11)]
    quick = [line(n, seconds=2.0) for n in range(11, 31)]
    assert time_left(slow + quick, 40) == pytest.approx(2.0 * 10)
    assert time_left(quick, 30) == 0.0
    assert time_left([], 10) == 0.0


def test_a_finished_run_shows_curves_clients_bytes_and_result(tmp_path: Path) -> None:
    lines = [
        line(n, accuracy=0.1 * n, loss=1.0 / n, clients={"ids": [n % 3, 7], "loss": [0.25, 0.5]}) for n in range(1, 9)
    ]
    summary = {"validation": {"accuracy": 0.8}, "test": {"accuracy": 0.7512}, "best_round": 8}
    text = shown(made(tmp_path / "r", lines, status="finished", summary=summary))
    for expected in (
        "seen",
        "fedavg",
        "finished",
        "round 8/8",
        "validation %",
        "80",
        "10",
        "validation loss",
        "training loss",
        "#7 █ 0.5",
        "#0 ▅ 0.25",
        "8.0 kB up, 24.0 kB down, 4.0 kB per round",
        "test 75.12 %",
        "(round 8)",
    ):
        assert expected in text, expected
    assert "left" not in text
    assert max(map(len, text.splitlines())) <= 80


def test_before_the_first_round_and_without_evaluations(tmp_path: Path) -> None:
    text = shown(made(tmp_path / "a", [], status="interrupted"))
    assert "round 0/8" in text and "validation" not in text and "sent" not in text
    text = shown(made(tmp_path / "b", [line(1), line(2)], status="interrupted"))
    assert "training loss" in text and "validation" not in text
    assert "fedgraft resume" in text


def test_a_failed_run_says_why_and_markup_in_it_is_text(tmp_path: Path) -> None:
    text = shown(made(tmp_path / "r", [line(1)], status="failed", reason="ValueError: [bold]no[/bold]"))
    assert "failed" in text and "ValueError: [bold]no[/bold]" in text


def test_only_the_worst_clients_are_listed(tmp_path: Path) -> None:
    many = {"ids": list(range(40)), "loss": [0.01 * k for k in range(40)]}
    text = " ".join(shown(made(tmp_path / "r", [line(1, clients=many)], status="interrupted"), 110).split())
    assert "#39 █" in text and "#28 " in text and "#27 " not in text and "and 28 more" in text


@pytest.mark.parametrize("width", [30, 60, 200])
def test_it_fits_narrow_and_wide_terminals(tmp_path: Path, width: int) -> None:
    run = made(tmp_path / "r", [line(n, accuracy=0.5, loss=0.1) for n in range(1, 4)], status="interrupted")
    assert max(map(len, shown(run, width).splitlines())) <= width


@pytest.mark.parametrize("loss", [0.6343, 1.2345678e-05, -1.2345678e-05, 137.25, 1.0])
def test_no_number_cuts_a_curve_off(tmp_path: Path, loss: float) -> None:
    run = made(tmp_path / "r", [line(n, accuracy=0.5, loss=loss * n) for n in range(1, 4)], status="interrupted")
    assert "…" not in shown(run, 80) and "…" not in shown(run, 110)


def test_a_torn_last_line_does_no_harm(tmp_path: Path) -> None:
    run = made(tmp_path / "r", [line(1), line(2)], status="interrupted")
    with run.metrics_path.open("a") as file:
        file.write('{"round":3,"train_')
    assert "round 2/8" in shown(run)


def test_watching_ends_with_the_run_and_changes_no_file(tmp_path: Path) -> None:
    run, text = made(tmp_path / "r", [line(1)], status="interrupted"), io.StringIO()
    owner, locked, go = RunFolder.open(run.path), threading.Event(), threading.Event()

    def work() -> None:
        with owner.writing(console=False):
            owner.append(line(2, accuracy=0.5, loss=0.3))
            locked.set()
            go.wait(20)
            owner.append(line(3))
            owner.finish({"validation": {"accuracy": 0.5}, "test": {"accuracy": 0.4}, "best_round": 2})

    worker = threading.Thread(target=work)
    worker.start()
    assert locked.wait(20)
    before = {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()}
    assert "about 12.0 s left" in shown(run)  # six rounds of two seconds
    console = Console(file=text, width=80, force_terminal=True)
    watch_run(run.path, console, once=True)
    assert {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()} == before
    threading.Timer(0.3, go.set).start()
    watch_run(run.path, console, every=0.05)  # returns because the run ends
    worker.join(20)
    assert "running" in text.getvalue() and "finished" in text.getvalue() and "test 40.00 %" in text.getvalue()


def test_ctrl_c_leaves_quietly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fedgraft.cli import sweep as cli_sweep
    from fedgraft.report import watch as module

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "watch_run", interrupted)
    cli_sweep.watch(tmp_path)


def test_a_folder_without_a_run_is_named(tmp_path: Path) -> None:
    with raises("E-REPORT-NO-RUN"):
        watch_run(tmp_path, Console(file=io.StringIO()))


def test_a_centralised_run_counts_epochs(tmp_path: Path) -> None:
    run = made(tmp_path / "run", [line(1)], status="interrupted")
    assert "round 1/8" in shown(run) and "epoch" not in shown(run)
    central = load(None, [*OVERRIDES, "centralized.active=true"])
    (run.path / "config.toml").write_text(to_toml(central))
    assert "epoch 1/8" in shown(run) and "centralized" in shown(run)
