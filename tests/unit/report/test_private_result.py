"""The first lines of a private run's result: epsilon, delta, the unit, what is outside; notes come after them."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from fedgraft.report.display import print_results
from fedgraft.runs.api import Result

TOLD = {
    "epsilon": 5.84,
    "delta": 1e-5,
    "unit": "client",
    "epsilon_without_amplification": 8.39,
    "repeatable_noise": True,
    "not_covered": ["who takes part", "claims", "choices"],
}
SUMMARY = {
    "note": "no round beat the start.",
    "validation": {"accuracy": 0.5},
    "best_round": 3,
    "rounds": 3,
    "bytes_up": 1,
    "bytes_down": 1,
    "seconds": 1.0,
    "edited": {"coordinates": 1, "of": 2},
    "start": 0.5,
}
FIRST = ["epsilon 5.84 at delta 1e-05 for each client", "epsilon 8.39", "protect nobody", "who takes part"]


def shown(summary: dict[str, object]) -> list[str]:
    out = io.StringIO()
    print_results(Console(file=out, width=160), "a run", summary)
    return out.getvalue().splitlines()


@pytest.mark.parametrize("private", [True, False])
def test_what_is_promised_comes_before_everything_else(private: bool) -> None:
    said = shown(SUMMARY | ({"privacy": TOLD} if private else {}))
    at = next(i for i, line in enumerate(said) if "no round beat" in line)
    if not private:
        assert at == 0
        return
    rows = [line for line in said[:at] if "│" in line]
    assert all(text in row for text, row in zip(FIRST, rows, strict=False)) and len(rows) > len(FIRST)


def test_a_result_in_a_session_of_python_says_it_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Result, "curve", lambda self: [(0, 0.5)])
    result = Result.__new__(Result)
    object.__setattr__(result, "summary", SUMMARY | {"privacy": TOLD})
    object.__setattr__(result, "folder", tmp_path)
    lines = repr(result).splitlines()
    assert all(text in line for text, line in zip(FIRST, lines, strict=False)) and "no round beat" in lines[len(FIRST)]
