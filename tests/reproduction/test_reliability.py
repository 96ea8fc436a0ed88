"""Each check of `make reliability` at a small scale: it holds, and its broken variants do not."""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.reliability.__main__ import CHECKS  # noqa: E402
from benchmarks.reliability.outcome import OVER_PROCESSES, PAGE, Outcome, keep, kept, page, share  # noqa: E402

SCALES = {"view": 0.02, "hostile": 0.01, "thousand": 0.06, "malformed": 0.001}
SLOW = {"damaged": 0.02, "cost": 0.1, "accounts": 0.004, "noise": 0.02, "combinations": 0.01}
LONG = {
    "kills": 0.02,
    "sizes": 0.25,
    "liar": 0.1,
    "soak": 0.02,
    "orders": 0.02,
    "membership": 0.1,
    "epsilon": 1.0,
    "uneven": 0.1,
    "stages": 0.05,
    "dropouts": 0.01,
}
"""Half a minute and more each even so; what they check in depth has tests of its own at the gate."""


@pytest.fixture(autouse=True)
def _log_level() -> Iterator[None]:
    """Checks silence the library's warnings; other tests want to hear them."""
    log = logging.getLogger("fedgraft")
    before = log.level
    yield
    log.setLevel(before)


def assert_holds(name: str, scale: float, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for package in (
        "scipy",
        "cryptography",
        *(["dp_accounting"] * (name == "accounts")),
        *(["flwr"] * (name == "cost")),
    ):
        pytest.importorskip(package)
    monkeypatch.setenv("FEDGRAFT_CACHE", str(tmp_path))
    outcome = getattr(importlib.import_module(f"benchmarks.reliability.{CHECKS[name].module}"), name)(scale)
    assert outcome.passed, outcome.result
    assert outcome.judged == (name != "soak"), "a few hundred rounds say nothing about a slope"
    assert outcome.caught and outcome.broken, outcome.broken


@pytest.mark.parametrize("name", SCALES)
def test_a_check_holds_and_catches_its_broken_variants(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert_holds(name, SCALES[name], monkeypatch, tmp_path)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", SLOW)
def test_a_slow_check_holds_and_catches_its_broken_variants(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert_holds(name, SLOW[name], monkeypatch, tmp_path)


@pytest.mark.slow
@pytest.mark.deploy
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", LONG)
def test_a_long_check_holds_and_catches_its_broken_variants(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert_holds(name, LONG[name], monkeypatch, tmp_path)


def test_every_check_is_run_by_a_test() -> None:
    assert {*SCALES, *SLOW, *LONG} == set(CHECKS)


ABOUT = {
    "scale": 0.5,
    "command": "c",
    "date": "d",
    "seconds": 3.0,
    "revision": "r",
    "machine": "m",
    "check": "kills",
}


@pytest.mark.parametrize(
    ("passed", "caught", "verdict"),
    [(True, True, "holds at this scale"), (True, False, "**fails**"), (False, True, "**fails**")],
)
def test_the_page_shows_what_is_stored_and_what_is_missing(
    tmp_path: Path, passed: bool, caught: bool, verdict: str
) -> None:
    """A bar that is met counts only when the broken variant misses it."""
    keep(tmp_path, "kills", Outcome(passed, "8 of 8", {"naive": "0 of 4"}, caught), ABOUT)
    assert kept(tmp_path, "kills") is not None and kept(tmp_path, "soak") is None
    lines = page(tmp_path, CHECKS).splitlines()
    kills, soak = (next(line for line in lines if line.startswith(f"| `{name}`")) for name in ("kills", "soak"))
    assert "8 of 8" in kills and "naive: 0 of 4" in kills and "0.5" in kills and kills.endswith(f"{verdict} |")
    assert soak.endswith("missing |")


def test_only_the_full_count_holds_without_a_word_about_scale(tmp_path: Path) -> None:
    keep(tmp_path, "kills", Outcome(True, "200 of 200", {"naive": "0"}, True), {**ABOUT, "scale": 1.0})
    assert "| 1 | holds |" in page(tmp_path, CHECKS)


def test_a_run_that_is_too_short_is_not_called_good(tmp_path: Path) -> None:
    keep(tmp_path, "soak", Outcome(True, "300 rounds", {"leak": "+18"}, True, judged=False), ABOUT)
    assert next(line for line in page(tmp_path, CHECKS).splitlines() if "`soak`" in line).endswith("judge |")


def test_a_page_drawn_again_keeps_every_row_and_what_was_written_by_hand(tmp_path: Path) -> None:
    before = PAGE.read_text()
    assert OVER_PROCESSES in before and page(tmp_path, CHECKS, before) == before
    assert OVER_PROCESSES not in page(tmp_path, CHECKS)


def test_counts_shrink_with_the_scale() -> None:
    assert share(200, 1.0) == 200 and share(200, 0.1) == 20 and share(200, 1e-9) == 1 and share(200, 0.0, 4) == 4
