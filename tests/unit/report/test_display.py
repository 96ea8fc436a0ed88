"""Tables of the terminal: no name is cut however narrow it is, nothing is called None, a share says of how many."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from fedgraft.report.display import print_next_commands, print_results, print_runs
from fedgraft.report.run_record import RunInfo

LONG = "sweep-of-learning-rates/vit-tiny-patch16-224-lr=0.0003-0123456789abcdef"


def shown(width: int, *arguments: object) -> str:
    text = io.StringIO()
    show = print_runs if len(arguments) == 1 else print_results
    show(Console(file=text, width=width), *arguments)  # type: ignore[arg-type]
    return text.getvalue()


@pytest.mark.parametrize("width", [40, 80, 200])
def test_a_name_is_never_cut(width: int) -> None:
    done = RunInfo(LONG, Path(LONG), "finished", 40, 0.5, 0.25, 2_500_000, 61.0, "d")
    text = shown(width, [done, RunInfo("new", Path("new"), "interrupted", None, None, None, 0, 0.0, "d")])
    line = next(line for line in text.splitlines() if LONG in line)
    assert all(part in line for part in ("finished", "40", "50.00 %", "25.00 %", "2.5 MB", "1 min 01 s"))
    assert "None" not in text and "…" not in text and text.count("–") == 5


@pytest.mark.parametrize("width", [40, 80])
def test_the_final_table_says_of_how_many(width: int) -> None:
    summary = {
        "test": {"accuracy": 13 / 19, "count": 19, "loss": 1.25, "top5": 1.0},
        "validation": {"accuracy": 0.7},
        "best_round": 3,
        "rounds": 8,
        "bytes_up": 1000,
        "bytes_down": 2000,
        "seconds": 4.0,
        "start": 0.1,
        "edited": {"coordinates": 10, "of": 2000},
        "personal": {"mean": 0.5, "min": 0.25, "max": 0.75},
    }
    text = shown(width, "a [b]", summary)
    wanted = [
        "68 % - 13 of 19 images, 95 % interval 46 to 85 %",
        "70.00 % (round 3 of 8; 10.00 % at the start)",
        "10 of 2,000",
        "a [b]",
    ]
    assert all(part in text for part in [*wanted, "50.00 % (25.00 % to 75.00 %)", "1.0 kB / 2.0 kB"])
    untested = shown(width, "a", {"validation": {"accuracy": 0.7}, "best_round": 3, "rounds": 8})
    assert "test" not in untested and "nan" not in untested


def test_what_to_try_next_is_typed_as_the_command_was_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After `make run` nobody has the environment's commands on the path; in an active environment the name will do."""
    program = tmp_path / "bin" / "fedgraft"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["bin/fedgraft", "run", "demo"])
    for path, wanted in (("/nowhere", "bin/fedgraft show runs/a"), (str(program.parent), "fedgraft show runs/a")):
        monkeypatch.setenv("PATH", path)
        text = io.StringIO()
        print_next_commands(Console(file=text, width=80), Path("runs/a"))
        assert text.getvalue().splitlines()[1].strip() == wanted
    monkeypatch.setattr("sys.argv", ["/elsewhere/pytest"])  # from Python: its name
    text = io.StringIO()
    print_next_commands(Console(file=text, width=80), Path("runs/a"))
    assert "  fedgraft predict runs/a IMAGES" in text.getvalue()
