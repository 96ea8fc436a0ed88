"""Metrics by subgroup: the sums are those of the group's images, and no small group follows by subtraction."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score
from tests.support.errors import raises
from tests.support.tiny import CNN
from torch import Tensor
from typer.testing import CliRunner

from fedgraft import data as fd
from fedgraft.cli.main import app
from fedgraft.config.load import load
from fedgraft.core.label_sets import PRESENT, UNKNOWN
from fedgraft.metrics import label_scores, raw, subgroups
from fedgraft.metrics.subgroups import Subgroups, told_labels, withheld
from fedgraft.runs.loop import run


def no_small_remainder(rule: Callable[[Tensor, int], Tensor]) -> None:
    """No group told is small, and what is left when those told are taken from all is nothing or large enough."""
    draw = np.random.default_rng(0)
    for _ in range(300):
        groups = int(draw.integers(1, 6))
        counts = torch.from_numpy(draw.integers(0, 12, (groups + 1, 3)))
        hidden = rule(counts, 5)
        for column in range(3):
            told = counts[:-1, column][~hidden[:, column]]
            assert all(count == 0 or count >= 5 for count in told.tolist())
            rest = int(counts[:, column].sum() - told.sum())
            alone = not len(told) or not int(told.sum())
            assert rest == 0 or rest >= 5 or alone


def test_no_group_follows_by_subtraction() -> None:
    no_small_remainder(withheld)
    with pytest.raises(AssertionError):  # leaving out the small group alone: all less the others is that group
        no_small_remainder(lambda counts, smallest: (counts[:-1] > 0) & (counts[:-1] < smallest))


def test_a_small_finding_is_unknown_in_its_group_and_in_another() -> None:
    labels = torch.zeros(40, 2, dtype=torch.int64)
    labels[:2, 0] = PRESENT  # two of group 0 have the first finding, ten of group 1
    labels[20:30, 0] = PRESENT
    labels[::2, 1] = PRESENT
    numbers = (torch.arange(40) >= 20).long()
    told = told_labels(labels, numbers, 2, 5)
    assert [len(places) for places, _ in told] == [20, 20]
    assert [unknown.tolist() for _, unknown in told] == [[True, False], [True, False]]
    classes = torch.tensor([0] * 18 + [1] * 2 + [0] * 8 + [1] * 12)
    told = told_labels(classes, numbers, 2, 5)
    assert [len(places) for places, _ in told] == [18, 8]


def test_sums_of_groups_add_up_to_those_of_all() -> None:
    draw = torch.Generator().manual_seed(1)
    logits = torch.randn(60, 3, generator=draw)
    labels = torch.randint(-1, 2, (60, 3), generator=draw)
    numbers = torch.randint(0, 3, (60,), generator=draw)
    total = label_scores.count_label_scores(logits, labels)
    parts = []
    for places, unknown in told_labels(labels, numbers, 3, 1):
        assert not unknown.any()
        parts.append(label_scores.count_label_scores(logits[places], labels[places]))
    for name, tensor in total.items():
        assert torch.equal(torch.stack([part[name] for part in parts]).sum(0), tensor), name


def table_of(folder: Path, sexes: str) -> Path:
    """Write 80 images with two findings, and a column `sex`."""
    draw = np.random.default_rng(3)
    folder.mkdir()
    lines = ["image,bright,striped,sex,split"]
    from PIL import Image

    for number in range(80):
        bright, striped = draw.integers(0, 2, 2)
        pixels = draw.normal(80 + 90 * bright, 15, (16, 16))
        pixels[::2] += 40 * striped
        Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(folder / f"{number}.png")
        split = "test" if number >= 40 else "train"
        lines.append(f"{number}.png,{bright},{striped},{sexes[number % len(sexes)]},{split}")
    (folder / "labels.csv").write_text("\n".join(lines))
    return folder


WORDS = [CNN, "rounds.total=1", "rounds.fraction=1.0", "partition.clients=2", "local.steps=2", "data.source=table"]
WORDS += [
    'data.findings=["bright","striped"]',
    "engine=reference",
    "workers=1",
    'metrics=["auroc","calibration_error"]',
]


def test_a_run_tells_metrics_by_subgroup(tmp_path: Path) -> None:
    path = table_of(tmp_path / "data", "FMFMFMFMFMFMFMFMFMFX")
    config = load(None, [*WORDS, f"data.path={path}", 'metrics_by=["sex"]'])
    folder = tmp_path / "run"
    summary = run(config, folder)
    told = summary["subgroups"]["sex"]
    assert set(told) == {"F", "M", "X"}
    assert told["X"] is None  # two images, and the smallest group is five
    assert told["M"] is None  # with it, because all less F would be X and M alone: M has 18 images
    assert told["F"]["auroc"]["n"] == 20 and told["F"]["calibration_error:bright"]["n"] == 20
    assert "By subgroup" in (folder / "report.html").read_text()
    json.dumps(summary)


def test_what_cannot_be_told_by_subgroup_is_refused(tmp_path: Path) -> None:
    path = table_of(tmp_path / "data", "FM")
    for words, code in (
        (['metrics_by=["age"]'], "E-RUN-SUBGROUP-COLUMN"),
        (['metrics_by=["sex"]', "metrics=[]"], "E-RUN-SUBGROUP-METRICS"),
        (['metrics_by=["=F"]'], "E-METRICS-SUBGROUPS"),
        (['metrics_by=["sex","sex"]'], "E-METRICS-SUBGROUPS"),
    ):
        with raises(code):
            run(load(None, [*WORDS, f"data.path={path}", *words]), tmp_path / "refused")


def test_python_arrays_bring_columns() -> None:
    images = np.zeros((30, 8, 8), np.uint8)
    dataset = fd.arrays(images, np.arange(30) % 2, columns={"sex": ["F", "M", "M"] * 10})
    assert set(dataset.test.columns["sex"].tolist()) <= {"F", "M"}
    numbers = Subgroups("sex", ("M",)).numbers(np.array(["F", "M", ""]))
    assert numbers.tolist() == [1, 0, 1]
    labels = torch.tensor([[1, UNKNOWN]])
    assert subgroups.without_findings(labels, torch.tensor([True, False])).tolist() == [[UNKNOWN, UNKNOWN]]


@pytest.mark.slow
def test_the_consortiums_commands_take_findings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each works, or says in one sentence what it does not do: worth, unlearn, release, verify, preflight, attack."""
    monkeypatch.chdir(tmp_path)
    path = table_of(tmp_path / "data", "FM")
    words = [*WORDS, f"data.path={path}", "partition.kind=iid"]
    run(load(None, words), tmp_path / "run")
    runner = CliRunner()
    for command in (
        ["worth", "run"],
        ["verify", "run"],
        ["unlearn", "run", "--client", "1"],
        ["release", "run", "--shadows", "1"],
        ["preflight", *words],
        ["attack", *words, "partition.clients=5", "--attacks", "label_flip,sign_flip", "--rules", "median"],
    ):
        result = runner.invoke(app, command)
        known = result.exception is None or isinstance(result.exception, SystemExit)
        assert known, (command, result.output[-500:], result.exception)
    gains = json.loads((tmp_path / "run" / "worth" / "worth.json").read_text())
    assert set(gains) == {"auroc"} and len(gains["auroc"]) == 2
    table = (tmp_path / "attack" / "attack.csv").read_text()
    assert "needs one class per image" in table  # labels cannot be flipped where an image has any number of them


def test_exact_areas_of_findings_are_those_of_scikit_learn() -> None:
    draw = torch.Generator().manual_seed(5)
    logits = torch.randn(80, 2, generator=draw)
    labels = torch.randint(-1, 2, (80, 2), generator=draw)
    found = raw.exact(logits, labels, ("a", "b"))
    gains = raw.paired_bootstrap(logits, logits * 2 + 1, labels, ("a", "b"), 0, 20)
    for place, name in enumerate(("a", "b")):
        known = labels[:, place] != UNKNOWN
        area = found[f"auroc:{name}"]
        assert area is not None
        assert area.value == pytest.approx(roc_auc_score(labels[known, place], logits[known, place]), abs=1e-12)
        gain = gains[f"auroc:{name}"]
        assert gain is not None and abs(gain.value) < 0.01  # the same order, but for the bins
