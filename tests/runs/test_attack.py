"""`fedgraft attack`: the table it makes, what each number means, and what it refuses."""

from __future__ import annotations

import csv
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.errors import raises

from fedgraft.config.load import Config, load
from fedgraft.consortium import attacked
from fedgraft.consortium.attack import (
    RULES,
    AttackPlan,
    AttackResult,
    attack_table,
    partition_of,
    summary_rows,
    write_attack_table,
)
from fedgraft.consortium.attacked import BENIGN, OUTCOME
from fedgraft.core.errors import FedgraftError
from fedgraft.core.files import without_timing
from fedgraft.engines.attackers import NAMES
from fedgraft.runs.folder import RunFolder
from fedgraft.runs.loop import run

with warnings.catch_warnings():  # typer's own import of click warns with some pairs of versions
    warnings.simplefilter("ignore", DeprecationWarning)
    from typer.testing import CliRunner

    from fedgraft.cli.main import app

TINY = [
    "data.source=digits",
    "data.limit=300",
    "model.name=tiny",
    "partition.clients=7",
    "rounds.fraction=1.0",
    "local.steps=2",
    "local.batch_size=16",
    "rounds.total=2",
    "local.lr=0.05",
    "model.ridge=1.0",
    "data.image_size=16",
]


def config(*overrides: str) -> Config:
    return load(None, [*TINY, *overrides])


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDGRAFT_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


Numbers = dict[tuple[str, str], tuple[float | None, float | None]]


def table(root: Path, settings: Config, attacks: list[str], rules: list[str], share: float = 0.2) -> Numbers:
    """(accuracy, backdoor) by rule and attack."""
    results = attack_table(AttackPlan(settings, attacks, rules, share), root, report=lambda line: None)
    return {(result.rule, result.attack): (result.accuracy, result.backdoor) for result in results}


def test_a_table_of_rules_and_attacks(tmp_path: Path) -> None:
    lines: list[str] = []
    plan = AttackPlan(config(), ["sign_flip", "nan", "backdoor_boosted"], ["mean", "bulyan", "nnm+median"], 0.15)
    results = attack_table(plan, tmp_path, report=lines.append)
    assert len(results) == len(lines) == 3 * 4
    assert all(c.accuracy is not None and 0 <= c.accuracy <= 1 and not c.note for c in results)
    by_name = {(c.rule, c.attack): c.accuracy for c in results}
    # Validation drops NaN, so the mean of the others stays near the benign one.
    assert by_name["mean", "nan"] == pytest.approx(by_name["mean", BENIGN], abs=0.08)
    assert lines[0].startswith("[1/12] stratified / mean / benign / seed 0: validation ")
    assert not list(tmp_path.rglob("checkpoints"))
    assert attack_table(plan, tmp_path, report=lines.append) == results and len(lines) == 12  # nothing is run twice


def test_a_benign_cell_is_the_run_of_the_same_config(tmp_path: Path) -> None:
    """Without attackers the rounds are those of `fedgraft run`, to the bit; with them they are not."""
    settings = config("rounds.evaluate_every=0", "rounds.test=false", "partition.kind=stratified")
    run(settings, tmp_path / "run", console=False)
    table(tmp_path / "t", settings, ["scaling"], ["mean"])
    lines = [
        without_timing(RunFolder.open(next(path.glob("*/run.json")).parent).metrics())
        for path in (tmp_path, tmp_path / "t" / "benign-0.2", tmp_path / "t" / "scaling-0.2")
    ]
    assert lines[0] == lines[1] != lines[2]


def test_a_table_that_was_killed_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed in a round, and between a run's end and its measurement: the same table, and nothing begun again."""
    whole = table(tmp_path / "a", config(), ["sign_flip"], ["median"])
    measure, calls = attacked.measure_attacked, list[int]()

    def killed(*made: Any) -> dict[str, float | None]:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return measure(*made)

    monkeypatch.setattr(attacked, "measure_attacked", killed)
    with pytest.raises(KeyboardInterrupt):
        table(tmp_path / "b", config(), ["sign_flip"], ["median"])
    assert len(list((tmp_path / "b").rglob(OUTCOME))) == 1
    assert table(tmp_path / "b", config(), ["sign_flip"], ["median"]) == whole and len(calls) == 3


@pytest.mark.parametrize("cache_features", ["true", "false"])
def test_a_boosted_backdoor_succeeds_against_the_mean(tmp_path: Path, cache_features: str) -> None:
    """With cached features and from pixels; the benign model does not have it, and the attacked one still works."""
    settings = config("rounds.total=8", "local.lr=0.01", f"data.cache_features={cache_features}")
    results = table(tmp_path, settings, ["backdoor_boosted"], ["mean"], 0.3)
    benign, (accuracy, backdoor) = results["mean", BENIGN][1], results["mean", "backdoor_boosted"]
    assert benign is not None and backdoor is not None and backdoor > benign + 0.3
    assert (accuracy or 0) > 0.3  # not a model that says the target to everything


@pytest.mark.parametrize(
    ("options", "within"),
    [
        (("data.cache_features=true", "data.cache_features=false"), 0.02),
        (("workers=1", "workers=2"), 0.0),
        (("engine=reference", "engine=batched"), 0.01),
    ],
)
def test_the_same_table_however_it_is_computed(tmp_path: Path, options: tuple[str, str], within: float) -> None:
    attacks = ["label_flip", "backdoor"]  # a lie in the labels, and one in the images that are kept as features
    first, second = (table(tmp_path / option, config(option), attacks, ["median"], 0.15) for option in options)
    for name, (accuracy, backdoor) in first.items():
        assert (accuracy, backdoor) == pytest.approx(second[name], abs=within)


def test_a_rule_that_cannot_work_says_why_and_the_others_go_on(tmp_path: Path) -> None:
    results = attack_table(AttackPlan(config(), ["zero"], ["bulyan", "mean"], 0.3), tmp_path, report=lambda line: None)
    bulyan, mean = (
        next(result for result in results if result.rule == rule and result.attack == "zero")
        for rule in ("bulyan", "mean")
    )
    assert bulyan.accuracy is None and "needs at least 11 responses" in bulyan.note
    assert mean.accuracy is not None


def test_seeds_and_partitions_are_cells() -> None:
    plan = AttackPlan(config(), ["zero"], ["krum", "mean"], 0.3, ["iid", "dirichlet:0.5"], [1, 2])
    cells = plan.cells(Path("root"))
    assert len(cells) == len({cell.folder for cell in cells.values()}) == 16
    krum_config = cells[AttackResult("dirichlet:0.5", "krum", "zero", 2)].config
    assert (krum_config.seed, krum_config.partition.alpha, krum_config.algorithm.robust) == (2, 0.5, "krum")
    assert krum_config.algorithm.attackers == 2  # of seven clients, all in the cohort
    assert cells[AttackResult("iid", "mean", "zero", 1)].config.algorithm.attackers == 0


def test_partitions_by_word() -> None:
    assert partition_of("classes:3") == {"kind": "classes", "classes_per_client": 3}
    assert partition_of("iid") == {"kind": "iid"}
    for word in ("iid:3", "shards:x"):
        with raises("E-CONSORTIUM-PARTITION-NUMBER", partition=word):
            partition_of(word)
    with pytest.raises(FedgraftError, match=r"partition\.kind"):
        AttackPlan(config(), [], ["mean"], partitions=["shard"]).cells(Path())


def test_refusals(tmp_path: Path) -> None:
    """Known before the first cell has cost anything."""
    for name in ("sign_flip", "backdoor_boosted"):
        with raises("E-CONSORTIUM-ATTACK-SECURE", attack=name):
            AttackPlan(config("privacy.aggregation=secure"), ["label_flip", name], ["mean"])
    AttackPlan(config("privacy.aggregation=secure"), ["label_flip", "backdoor"], ["mean"])
    with raises("E-ENGINES-ATTACK-NAME", attack="sign"):
        AttackPlan(config(), ["sign"], ["mean"])
    with raises("E-CONSORTIUM-RULE", rule="average"):
        AttackPlan(config(), ["zero"], ["average"])
    with raises("E-ENGINES-ATTACKER-SHARE"):
        AttackPlan(config(), ["zero"], ["mean"], 0.6).cells(tmp_path)
    with raises("E-CONSORTIUM-NO-CELL"):  # no cell can run
        table(tmp_path, config("algorithm.name=fedshibu", "trainable.kind=body"), [], ["median"])


CELLS = [
    AttackResult("iid", "mean", BENIGN, 0, 0.9, 0.1),
    AttackResult("iid", "mean", "scaling", 0, 0.2, 0.0),
    AttackResult("iid", "mean", "backdoor", 0, 0.88, 0.95),
    AttackResult("iid", "krum", BENIGN, 0, 0.8, 0.1),
    AttackResult("iid", "krum", "scaling", 0, None, None, "Krum needs at least 7 responses."),
    AttackResult("iid", "krum", "backdoor", 0, 0.7, 0.2),
]


def test_drop_and_backdoor_stand_apart() -> None:
    (mean, krum), *_ = summary_rows(CELLS).values()
    assert mean["worst drop"] == "70.0 (scaling)" and mean["backdoor, worst (%)"] == "95.00"
    assert mean["backdoor, benign (%)"] == "10.00" and mean["benign (%)"] == "90.00"
    assert krum["worst drop"] == "–" and krum["scaling (%)"] == "–"  # a missing cell may have been the worst


def test_a_table_over_seeds_has_means() -> None:
    """Drops of 0.1 and 0.3 have the mean 0.2; the deviations are 0.1 / sqrt(2) points, n-1."""
    values = {BENIGN: (0.9, 0.8), "zero": (0.8, 0.5), "nan": (0.7, 0.75)}
    results = [AttackResult("iid", "mean", name, seed, both[seed]) for seed in (0, 1) for name, both in values.items()]
    (row,) = summary_rows(results)["iid"]
    assert row["benign (%)"] == "85.00 ± 7.07" and row["worst drop"] == "20.0 (zero)"


def test_given_features_have_no_place_for_a_trigger(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    labels = {"train_y": np.arange(140) % 4, "test_y": np.arange(40) % 4}
    inputs = {f"{n[:-1]}x": draw.normal(size=(len(y), 8)).astype(np.float32) + y[:, None] for n, y in labels.items()}
    np.savez(tmp_path / "given.npz", **labels, **inputs)
    settings = load(
        None,
        [
            "data.source=features",
            f"data.path={tmp_path / 'given.npz'}",
            "model.name=features",
            "partition.clients=5",
            "rounds.total=2",
        ],
    )
    results = table(tmp_path / "t", settings, ["sign_flip"], ["mean", "median"])
    assert (
        all(backdoor is None and accuracy is not None for accuracy, backdoor in results.values()) and len(results) == 4
    )
    with raises("E-CONSORTIUM-BACKDOOR-FEATURES"):
        AttackPlan(settings, ["backdoor"], ["mean"])


def test_three_files(tmp_path: Path) -> None:
    markdown, lines, page = write_attack_table(CELLS, tmp_path / "out", "A <note>.")
    assert "| mean | 90.00 | 20.00 | 88.00 | 70.0 (scaling) | 10.00 | 95.00 |" in markdown.read_text()
    assert "- krum: Krum needs at least 7 responses." in markdown.read_text()
    rows = list(csv.DictReader(lines.open()))
    assert len(rows) == 6 and rows[1]["accuracy"] == "0.2" and rows[4]["accuracy"] == ""
    html = page.read_text()
    assert "A &lt;note&gt;." in html and "<note>" not in html and "70.0 (scaling)" in html


def test_the_command(tmp_path: Path) -> None:
    overrides = ["attack", *TINY, "--attacks", "sign_flip", "--rules", "mean,median", "--partitions"]
    result = CliRunner().invoke(app, [*overrides, "stratified,dirichlet:0.5", "-o", str(tmp_path / "t")])
    assert result.exit_code == 0, result.output
    text = (tmp_path / "t" / "attack.md").read_text()
    assert "## stratified" in text and "## dirichlet:0.5" in text and "20 % of them attacking" in text
    assert "dirichlet:0.5 / median / sign_flip / seed 0: validation" in result.output


def test_help_does_not_load_torch() -> None:
    code = "import sys; from fedgraft import cli; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True)


def test_the_defaults_of_the_command_exist() -> None:
    from fedgraft.cli import attack as cli_attack

    assert set(cli_attack.names(cli_attack._ATTACKS)) == {*NAMES} - {"inf"}
    assert set(cli_attack.names(cli_attack._RULES)) <= set(RULES)
