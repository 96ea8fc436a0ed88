"""What is said before a run is what it then does: bytes of the head, and noise that leaves nothing to learn."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fedgraft.config.load import load
from fedgraft.report.values import size
from fedgraft.runs.loop import run
from fedgraft.runs.plan import plan_run

BASE = [
    "model.name=tiny",
    "data.source=digits",
    "data.limit=200",
    "data.image_size=16",
    "partition.clients=8",
    "rounds.total=1",
    "local.steps=1",
    "workers=1",
]
PRIVATE = ["rounds.sampling=poisson", "algorithm.weighting=uniform"]


@pytest.mark.parametrize("head", ["ridge", "probe", "ncm", "random"])
def test_the_bytes_of_the_head_are_in_the_plan(head: str, tmp_path: Path) -> None:
    """Of one round they are most of what is sent, and the plan had left them out."""
    config = load(None, [*BASE, f"model.head={head}", "model.probe_steps=3"])
    (line,) = (text for text in plan_run(config) if text.startswith("bytes:"))
    planned = re.search(r"about ([\d.]+) (k?B|MB) up for the head", line)
    sent = run(config, tmp_path / "run", console=False).get("bytes_up_outside_rounds", 0)
    assert (planned is None) == (head == "random") == (sent == 0)
    if planned is not None:
        planned_bytes = float(planned[1]) * {"B": 1, "kB": 1e3, "MB": 1e6}[planned[2]]
        more = 1.5 if head == "probe" else 1.15  # a line search may ask once more; every answer has an envelope
        assert planned_bytes <= sent <= more * planned_bytes, (line, size(sent))


def test_what_a_secret_round_keeps_to_itself_is_not_said_to_be_outside_the_rounds(tmp_path: Path) -> None:
    config = load(None, [*BASE, *PRIVATE, "privacy.dp.noise=0.8", "privacy.dp.secret=true"])
    summary = run(config, tmp_path / "run", console=False)
    assert summary["bytes_up"] >= 0 and not [key for key in summary if key.endswith("outside_rounds")]


@pytest.mark.parametrize(("noise", "loud"), [(0.8, True), (0.01, False)])
def test_noise_that_drowns_every_update_is_told_before_the_run(noise: float, loud: bool) -> None:
    """By the lengths alone: a clipped update is at most 1 long, noise of z over m clients z * sqrt(weights) / m."""
    lines = plan_run(load(None, [*BASE, *PRIVATE, "rounds.fraction=0.5", f"privacy.dp.noise={noise}"]))
    (warning,) = [line for line in lines if "times as long" in line] or [""]
    assert bool(warning) == loud
    if loud:
        weights = 10 * (load_width() + 1)
        assert f"is {noise * weights**0.5 / 4:,.0f} times as long" in warning and f"{weights:,} weights" in warning


def load_width() -> int:
    import fedgraft as fg

    return fg.model("tiny").width
