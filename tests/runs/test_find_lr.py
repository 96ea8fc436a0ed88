"""`fedgraft find-lr`: a sweep whose cells are the beginnings of the run, what it chooses, and when it looks further."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from fedgraft.config.load import load
from fedgraft.consortium import lr_finder
from fedgraft.consortium.lr_finder import Findings, Probe, find_rate, rate_plan, widen
from fedgraft.core.errors import FedgraftError
from fedgraft.runs import loop as running
from fedgraft.runs.folder import RunFolder

with warnings.catch_warnings():  # typer's own import of click warns with some pairs of versions
    warnings.simplefilter("ignore", DeprecationWarning)
    from typer.testing import CliRunner

    from fedgraft.cli.main import app

TINY = [
    "model.name=tiny",
    "model.head=random",
    "data.source=digits",
    "data.image_size=16",
    "data.limit=60",
    "partition.clients=3",
    "rounds.fraction=1.0",
    "rounds.total=2",
    "rounds.evaluate_every=1",
    "local.steps=2",
    "local.batch_size=16",
    "local.lr=0.02",
    "trainable.sparse.sparsity=0.9",
    "trainable.sparse.samples=60",
    "trainable.sparse.rounds=2",
    "local.weight_decay=10",
]


@pytest.fixture(autouse=True, scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDGRAFT_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


def call(root: Path, *words: str) -> str:
    """What the command prints."""
    result = CliRunner().invoke(app, ["find-lr", *TINY, "-o", str(root), *words], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def refused(root: Path, *words: str) -> str:
    """The sentence the command refuses with."""
    result = CliRunner().invoke(app, ["find-lr", *TINY, "-o", str(root), *words])
    assert isinstance(result.exception, FedgraftError) and "\n" not in str(result.exception), result.output
    return str(result.exception)


def quiet(line: str) -> None:
    """Say nothing."""


def test_finding_a_rate(tmp_path: Path) -> None:
    words = ["trainable.kind=body", "--rates", "1e4,1e-4,0.02", "--rounds", "2"]
    text = call(tmp_path / "a", *words)
    assert text.count("diverged in round 1") == 2  # once when it was stopped, once in the table
    assert "best on validation: local.lr=0.02" in text and "edge" not in text
    assert text.index("0.0001 ") < text.index("0.02 ")  # in order, whatever was given
    again = call(tmp_path / "a", *words)
    assert (
        "2 of 3 runs were finished before" in again and "[" not in again
    )  # nothing is run twice, a stopped one neither
    assert again.splitlines()[-4:] == text.splitlines()[-4:]


@pytest.mark.parametrize(
    "overrides", [["trainable.kind=sparse", "trainable.match_norm=100"], ["trainable.kind=lora"], ["workers=2"]]
)
def test_a_probe_is_the_beginning_of_the_run(overrides: list[str], tmp_path: Path) -> None:
    config = load(None, [*TINY, "trainable.kind=body", *overrides, "local.lr=0.001"])
    (probe,) = find_rate(rate_plan(config, [0.001], 2), tmp_path / "s", report=quiet).probes
    running.run(config, tmp_path / "run", console=False)
    line = RunFolder.open(tmp_path / "run").metrics()[-1]
    assert (probe.accuracy, probe.loss) == (line["accuracy"], line["loss"])


def test_a_plan_is_constant_short_and_leaves_the_test_images_alone() -> None:
    config = load(None, [*TINY, "schedule.kind=cosine", "schedule.warmup=2", "rounds.patience=1", "rounds.total=50"])
    base = rate_plan(config, [0.1], 3).base
    assert (base.rounds.total, base.rounds.evaluate_every, base.rounds.test, base.rounds.patience) == (3, 1, False, 0)
    assert (base.schedule.kind, base.schedule.warmup, base.centralized.epochs) == ("none", 0, 3)


def test_finding_a_central_rate(tmp_path: Path) -> None:
    words = ["trainable.kind=body", "centralized.kind=finetune", "--rates", "0.01,0.3,1e4", "--rounds", "1"]
    text = call(tmp_path, *words, "--central")
    assert "diverged in round 1" in text and "best on validation" in text


def test_what_a_search_refuses(tmp_path: Path) -> None:
    assert "above 0" in refused(tmp_path, "--rates", "0,-1")
    assert "validation" in refused(tmp_path, "data.validation=0", "--rates", "0.1")
    assert "smaller" in refused(tmp_path, "trainable.kind=body", "--rates", "1e4", "--rounds", "1")
    assert "no option" in refused(tmp_path, "local.rate=1")


def test_choosing_among_probes() -> None:
    probes = (Probe(0.1, 0.8, 0.9, ""), Probe(0.2, 0.7, 0.8, ""), Probe(0.3, 0.9, 0.1, "diverged in round 3"))
    findings = Findings(probes)
    assert findings.best.rate == 0.2 and not findings.at_edge  # the lowest loss; a stopped one does not count
    assert Findings(probes[:2]).at_edge and not Findings(probes[:1]).at_edge
    assert findings.rows()[1] == {"learning rate": "0.2", "validation (%)": "70.00", "loss": "0.8", "status": "best"}
    assert [row["status"] for row in findings.rows()] == ["finished", "best", "diverged in round 3"]


def test_widening_by_hand() -> None:
    assert widen([0.01, 0.1], 0.1) == [0.01, 0.1, 1.0]
    assert widen([0.01, 0.03, 0.1], 0.01) == [0.00333, 0.01, 0.03, 0.1]
    assert widen([0.01, 0.03, 0.1], 0.03) == [0.01, 0.03, 0.1] and widen([0.1], 0.1) == [0.1]


@pytest.mark.parametrize(("peak", "tried"), [(0.3, 3), (1.5, 4), (1e9, 5)])
def test_a_best_rate_at_the_edge_is_tried_against_two_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, peak: float, tried: int
) -> None:
    """The nearer to its peak the better: inside, one beyond, and further than two more steps of ten reach."""

    class Near:
        def __init__(self, plan: lr_finder.SearchPlan, *rest: object) -> None:
            self.rates = plan.axes[0].values

        def run(self, processes: int) -> tuple[float, ...]:
            return self.rates

    monkeypatch.setattr(lr_finder, "Search", Near)
    monkeypatch.setattr(lr_finder, "_probe", lambda rate, root: Probe(rate, 0.0, abs(rate - peak), ""))
    plan = rate_plan(load(None, TINY), [0.03, 0.3, 3.0 if peak < 1 else 1.0], 1)
    lines: list[str] = []
    findings = find_rate(plan, tmp_path, report=lines.append)
    assert len(findings.probes) == tried and findings.at_edge == (tried == 5) and len(lines) == tried - 3


def test_pruning_is_passed_on() -> None:
    plan = rate_plan(load(None, TINY), [0.1, 0.2], 3, prune=2)
    assert (
        plan.prune_after == 2
        and plan.stop_diverged
        and replace(plan, prune_after=0) == rate_plan(load(None, TINY), [0.2, 0.1], 3)
    )
