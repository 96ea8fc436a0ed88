"""`fedgraft attack`: the table it makes, what each number means, and what it refuses."""

from __future__ import annotations

import csv
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from fedgraft import zoo
from fedgraft.engines.choice import Choice
from fedgraft.engines.pool import Pool
from fedgraft.errors import FedgraftError
from fedgraft.runs import attack as module
from fedgraft.runs.attack import HONEST, RULES, Arena, Cell, attack_table, federated, summary_rows, write
from fedgraft.config.load import Config, load
from fedgraft.runs.run import one_thread, run
from tests.support.toy import Toy

with warnings.catch_warnings():  # typer's own import of click warns with some pairs of versions
    warnings.simplefilter("ignore", DeprecationWarning)
    from typer.testing import CliRunner

    from fedgraft.cli.main import main as cli

TINY = [
    "data.source=digits", "data.limit=300", "model.name=tiny", "partition.clients=7", "rounds.fraction=1.0",
    "local.steps=2", "local.batch_size=16", "rounds.total=2", "local.lr=0.05", "model.ridge=1.0", "data.image_size=16",
]  # fmt: skip


def config(*overrides: str) -> Config:
    return load(None, [*TINY, *overrides])


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDGRAFT_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


def quiet(line: str) -> None:
    """Say nothing."""


def by_name(cells: list[Cell]) -> dict[tuple[str, str], Cell]:
    return {(cell.rule, cell.attack): cell for cell in cells}


def test_a_table_of_rules_and_attacks() -> None:
    said: list[str] = []
    attacks = ["sign_flip", "scaling", "nan", "backdoor_boosted"]
    cells = attack_table(config(), attacks, ["mean", "median", "bulyan", "nnm+median"], 0.15, report=said.append)
    assert len(cells) == len(said) == 4 * 5
    found = by_name(cells)
    assert found["mean", HONEST].accuracy is not None
    assert all(c.accuracy is not None and 0 <= c.accuracy <= 1 and not c.note for c in cells)
    # Screening drops NaN, so the mean of the others stays near the honest one.
    assert found["mean", "nan"].accuracy == pytest.approx(found["mean", HONEST].accuracy, abs=0.08)


def test_an_honest_cell_is_the_run_of_the_same_config(tmp_path: Path) -> None:
    """The table is not a second implementation: without liars it ends in the bits of `fedgraft run`."""
    settings = config("rounds.evaluate_every=0")
    run(settings, tmp_path / "run", console=False)
    from fedgraft.runs.checkpoint import load_latest

    last = load_latest(tmp_path / "run" / "checkpoints")
    assert last is not None
    with one_thread():
        arena = Arena(federated(settings, "stratified"), 0.2)
        assert torch.equal(arena._run(arena.algorithm("mean"), HONEST), last.tensors["vector"])


def test_cells_do_not_leave_traces_in_each_other() -> None:
    """A cell alone equals the same cell after others, attacks on data included."""
    alone = attack_table(config(), [], ["median"], report=quiet)[0]
    after = attack_table(config(), ["label_flip", "backdoor"], ["mean", "median"], report=quiet)
    assert by_name(after)["median", HONEST] == alone
    again = attack_table(config(), ["label_flip", "backdoor"], ["mean", "median"], report=quiet)
    assert again == after


@pytest.mark.parametrize("kept", ["true", "false"])
def test_a_boosted_backdoor_succeeds_against_the_mean(kept: str) -> None:
    """With kept features and from pixels; the honest model does not have it, and the attacked one still works."""
    settings = config("rounds.total=8", "local.lr=0.01", f"data.cache_features={kept}")
    found = by_name(attack_table(settings, ["backdoor_boosted"], ["mean"], 0.3, report=quiet))
    benign, attacked = found["mean", HONEST].backdoor, found["mean", "backdoor_boosted"].backdoor
    assert benign is not None and attacked is not None and attacked > benign + 0.3
    assert (found["mean", "backdoor_boosted"].accuracy or 0) > 0.3  # not a model that says the target to everything


def test_kept_features_and_pixels_agree() -> None:
    """The features of marked images are what the network makes of them."""
    cells = [
        attack_table(config(f"data.cache_features={kept}"), ["backdoor"], ["mean"], report=quiet)
        for kept in ("true", "false")
    ]
    for a, b in zip(*cells, strict=True):
        assert a.accuracy == pytest.approx(b.accuracy, abs=0.02) and a.backdoor == pytest.approx(b.backdoor, abs=0.02)


def test_worker_processes_give_the_same_table() -> None:
    one, two = (attack_table(config(f"workers={n}"), ["scaling"], ["krum"], 0.15, report=quiet) for n in (1, 2))
    assert one == two


def test_the_deadline_reaches_the_workers() -> None:
    arena = object.__new__(Arena)
    arena.config = config("workers=2", "rounds.deadline=7.5", "engine=reference")
    toy = Toy(zoo.fedavg())
    choice = Choice("pool", 2, "")
    arena.setup = SimpleNamespace(context=toy.context, choice=lambda context: choice)  # type: ignore[assignment]
    carrier = arena._carrier(toy.algorithm)
    assert isinstance(carrier, Pool) and (carrier.workers, carrier.deadline) == (2, 7.5)


def test_the_batched_engine_gives_nearly_the_same_table() -> None:
    attacks = ["scaling", "label_flip", "backdoor"]
    one, two = (
        attack_table(config(f"engine={kind}"), attacks, ["median"], 0.15, report=quiet)
        for kind in ("reference", "batched")
    )
    for a, b in zip(one, two, strict=True):
        assert a.accuracy == pytest.approx(b.accuracy, abs=0.01) and a.backdoor == pytest.approx(b.backdoor, abs=0.01)


def test_a_rule_that_cannot_work_says_why_and_the_others_go_on() -> None:
    cells = by_name(attack_table(config(), ["zero"], ["bulyan", "mean"], 0.3, report=quiet))
    assert cells["bulyan", "zero"].accuracy is None and "needs at least 11 replies" in cells["bulyan", "zero"].note
    assert cells["mean", "zero"].accuracy is not None


def test_partitions_by_word() -> None:
    assert federated(config(), "dirichlet:0.5").partition.alpha == 0.5
    assert federated(config(), "classes:3").partition.classes_per_client == 3
    assert federated(config("algorithm.robust=krum"), "iid").algorithm.robust == "mean"
    for word, sentence in {
        "iid:3": "takes no number",
        "shards:x": "needs a number",
        "shard:3": "takes no number",
    }.items():
        with pytest.raises(FedgraftError, match=sentence):
            federated(config(), word)
    with pytest.raises(FedgraftError, match=r"partition\.kind"):
        federated(config(), "shard")


def test_refusals() -> None:
    begun: list[str] = []
    for name in ("sign_flip", "backdoor_boosted"):  # known before the first cell has cost anything
        with pytest.raises(FedgraftError, match="nobody sees one"):
            attack_table(config("privacy.aggregation=secure"), ["label_flip", name], ["mean"], report=begun.append)
    assert not begun
    with pytest.raises(FedgraftError, match="no attack 'sign'"):
        attack_table(config(), ["sign"], ["mean"], report=quiet)
    with pytest.raises(FedgraftError, match="no rule 'average'"):
        attack_table(config(), ["zero"], ["average"], report=quiet)
    with pytest.raises(FedgraftError, match="no rule can help"):
        attack_table(config(), ["zero"], ["mean"], 0.6, report=quiet)
    with pytest.raises(FedgraftError, match="no rules to compare"):
        attack_table(config("algorithm.name=fedshibu", "trainable.kind=body"), ["zero"], ["mean"], report=quiet)


CELLS = [
    Cell("iid", "mean", HONEST, 0.9, 0.1),
    Cell("iid", "mean", "scaling", 0.2, 0.0),
    Cell("iid", "mean", "backdoor", 0.88, 0.95),
    Cell("iid", "krum", HONEST, 0.8, 0.1),
    Cell("iid", "krum", "scaling", None, None, "Krum needs at least 7 replies."),
    Cell("iid", "krum", "backdoor", 0.7, 0.2),
]


def test_drop_and_backdoor_stand_apart() -> None:
    (mean, krum), *_ = summary_rows(CELLS).values()
    assert mean["worst drop"] == "70.0 (scaling)" and mean["backdoor, worst (%)"] == "95.0"
    assert mean["backdoor, honest (%)"] == "10.0" and mean["honest (%)"] == "90.0"
    assert krum["worst drop"] == "–" and krum["scaling (%)"] == "–"  # a missing cell may have been the worst


def test_given_features_have_no_place_for_a_trigger(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    labels = {"train_y": np.arange(140) % 4, "test_y": np.arange(40) % 4}
    inputs = {f"{n[:-1]}x": draw.normal(size=(len(y), 8)).astype(np.float32) + y[:, None] for n, y in labels.items()}
    np.savez(tmp_path / "given.npz", **labels, **inputs)
    given = load(
        None,
        ["data.source=features", f"data.path={tmp_path / 'given.npz'}", "model.name=features", "partition.clients=5",
         "rounds.total=2"],
    )  # fmt: skip
    cells = attack_table(given, ["sign_flip"], ["mean", "median"], report=quiet)
    assert all(cell.backdoor is None and cell.accuracy is not None for cell in cells) and len(cells) == 4
    assert write(cells, tmp_path / "table")
    with pytest.raises(FedgraftError, match="pattern of pixels"):
        attack_table(given, ["backdoor"], ["mean"], report=quiet)


def test_three_files(tmp_path: Path) -> None:
    markdown, table, page = write(CELLS, tmp_path / "out", "A <note>.")
    assert "| mean | 90.0 | 20.0 | 88.0 | 70.0 (scaling) | 10.0 | 95.0 |" in markdown.read_text()
    assert "- krum: Krum needs at least 7 replies." in markdown.read_text()
    rows = list(csv.DictReader(table.open()))
    assert len(rows) == 6 and rows[1]["accuracy"] == "0.2" and rows[4]["accuracy"] == ""
    html = page.read_text()
    assert "A &lt;note&gt;." in html and "<note>" not in html and "70.0 (scaling)" in html


def test_the_command(tmp_path: Path) -> None:
    overrides = ["attack", *TINY, "--attacks", "sign_flip", "--rules", "mean,median", "--partitions"]
    result = CliRunner().invoke(cli.app, [*overrides, "stratified,dirichlet:0.5", "-o", str(tmp_path / "t")])
    assert result.exit_code == 0, result.output
    text = (tmp_path / "t" / "attack.md").read_text()
    assert "## stratified" in text and "## dirichlet:0.5" in text and "20 % of them lying" in text
    assert "dirichlet:0.5 / median / sign_flip: accuracy" in result.output


def test_help_does_not_load_torch() -> None:
    code = "import sys; from fedgraft import cli; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True)


def test_the_defaults_of_the_command_exist() -> None:
    from fedgraft.cli import attack as cli_attack

    module._check(cli_attack.names(cli_attack._ATTACKS), module.NAMES, "attack")
    module._check(cli_attack.names(cli_attack._RULES), RULES, "rule")
