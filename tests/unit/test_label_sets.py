"""Images with sets of findings: data, losses, sums and metrics, against scikit-learn and plain formulas."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn import metrics as reference
from tests.support.errors import raises
from tests.support.toy import ToyNetwork

import fedgraft as fg
from fedgraft.client.actions.evaluation import without_small_findings
from fedgraft.client.context import ClientContext
from fedgraft.core.label_sets import UNKNOWN, image_losses, label_losses, logit_errors
from fedgraft.core.messages import Request
from fedgraft.core.space import select
from fedgraft.data.examples import FeatureExamples
from fedgraft.edit.fisher import logit_gradients
from fedgraft.local.losses import LossContext, cross_entropy, one_vs_all
from fedgraft.metrics import label_metrics, label_scores, sums
from fedgraft.metrics.label_scores import EDGES
from fedgraft.metrics.scores import merge_scores
from fedgraft.runs import head_init

CNN = "cnn:width=4,size=16"
NAMES = ("edema", "mass", "nodule")


def _labels(n: int = 300, seed: int = 0) -> np.ndarray:
    """Return findings of several frequencies, one in ten unknown (NaN)."""
    rng = np.random.default_rng(seed)
    labels = (rng.random((n, 3)) < [0.3, 0.5, 0.15]).astype(float)
    labels[rng.random((n, 3)) < 0.1] = np.nan
    return labels


def _images(labels: np.ndarray, seed: int = 0) -> np.ndarray:
    """Return images (n, 16, 16, 3) in which each finding brightens a corner of one colour a little."""
    images = np.random.default_rng(seed).integers(0, 200, (len(labels), 16, 16, 3))
    for finding, (top, left) in enumerate([(0, 0), (8, 0), (0, 8)]):
        images[:, top : top + 8, left : left + 8, finding] += np.nan_to_num(labels[:, finding] * 50).astype(int)[
            :, None, None
        ]
    return images.astype(np.uint8)


def _clients(n: int = 300, clients: int = 3) -> Any:
    labels = _labels(n)
    data = fg.data.arrays(_images(labels), labels, classes=NAMES)
    return fg.data.partition.iid(data, clients, seed=1)


# ---- data


def test_a_matrix_of_findings_becomes_label_sets() -> None:
    labels = _labels()
    data = fg.data.arrays(_images(labels), labels, classes=NAMES)
    assert data.classes == NAMES
    stored = np.concatenate([data.train.findings, data.test.findings])
    assert len(stored) == 300 and set(np.unique(stored)) == {-1, 0, 1}
    expected = np.where(np.isnan(labels), -1, labels)
    assert (np.sort(stored, axis=0) == np.sort(expected, axis=0)).all()
    taken = data.train.take(np.array([3, 1]))
    assert (taken.targets == data.train.findings[[3, 1]]).all()


def test_unknown_may_be_written_as_minus_one_and_gives_the_same_data() -> None:
    labels = _labels()
    numbers = np.where(np.isnan(labels), -1, labels).astype(int)
    first = fg.data.arrays(_images(labels), labels, classes=NAMES)
    second = fg.data.arrays(_images(labels), numbers, classes=NAMES)
    assert first.train.digest == second.train.digest
    changed = numbers.copy()
    changed[0, 0] = 1 - abs(changed[0, 0])
    assert fg.data.arrays(_images(labels), changed, classes=NAMES).train.digest != first.train.digest


def test_wrong_values_and_names_are_refused() -> None:
    labels = np.zeros((20, 3))
    labels[7, 2] = 2
    with raises("E-DATA-LABEL-SET-VALUE", row=7, column=2):
        fg.data.arrays(_images(np.zeros((20, 3))), labels)
    with raises("E-DATA-FINDING-NAMES"):
        fg.data.arrays(_images(np.zeros((20, 3))), np.zeros((20, 3)), classes=("one", "two"))


def test_splits_take_equal_shares_of_label_sets() -> None:
    labels = np.tile([[1, 0], [0, 1], [1, 1], [0, 0]], (50, 1))
    data = fg.data.arrays(np.zeros((200, 8, 8, 3), np.uint8), labels, test_share=0.2)
    _, counts = np.unique(data.test.findings, axis=0, return_counts=True)
    assert counts.tolist() == [10, 10, 10, 10]


def test_datasets_with_other_findings_are_joined_with_unknown_ones() -> None:
    zeros = np.zeros((40, 2))
    zeros[::2] = 1
    images = np.zeros((40, 8, 8, 3), np.uint8)
    first = fg.data.arrays(images, zeros, classes=("a", "b"))
    second = fg.data.arrays(images, zeros, classes=("b", "c"))
    federated = fg.data.partition.given([first, second])
    findings = federated.dataset.train.findings
    assert federated.dataset.classes == ("a", "b", "c")
    own = federated.partition.train_rows(1)
    assert (findings[federated.train[own]][:, 0] == UNKNOWN).all()
    with raises("E-DATA-MIXED-LABELS"):
        fg.data.partition.given([first, fg.data.arrays(images, np.tile(["b", "c"], 20))])


@pytest.mark.parametrize(
    "kind, options", [("classes", {"per_client": 2}), ("shards", {}), ("groups", {"groups": [[0]]})]
)
def test_partitions_by_class_are_refused(kind: str, options: dict[str, Any]) -> None:
    data = fg.data.arrays(_images(_labels()), _labels())
    with raises("E-DATA-ONE-CLASS"):
        getattr(fg.data.partition, kind)(data, 2, **options)


# ---- losses


def _network(logits: torch.Tensor) -> Any:
    return lambda inputs, entry: logits


def test_the_loss_is_the_sum_over_known_labels_and_unknown_ones_have_no_gradient() -> None:
    labels = torch.tensor([[1, 0, -1], [-1, -1, -1], [0, 1, 1]])
    logits = torch.tensor([[0.5, -2.0, 50.0], [9.0, 9.0, 9.0], [1.0, 3.0, -1.0]], requires_grad=True)
    expected = 0.0
    for row in range(3):
        for column in range(3):
            if labels[row, column] != UNKNOWN:
                sign = 2 * float(labels[row, column]) - 1
                expected += float(np.log1p(np.exp(-sign * float(logits[row, column].detach()))))
    value = one_vs_all().begin(LossContext(_network(logits), labels, 3))
    loss = value(_network(logits), torch.zeros(3), labels, 0)
    assert float(loss.detach()) == pytest.approx(expected / 3, rel=1e-6)
    loss.backward()
    assert logits.grad is not None
    assert (logits.grad[labels == UNKNOWN] == 0).all()
    assert torch.allclose(logits.grad, logit_errors(logits.detach(), labels) / 3, atol=1e-7)


def test_without_unknown_labels_it_is_the_one_vs_all_loss_of_classes() -> None:
    classes = torch.tensor([0, 2, 1, 1])
    sets = torch.nn.functional.one_hot(classes, 3)
    logits = torch.randn(4, 3)
    loss = one_vs_all(0.1)
    by_class = loss.begin(LossContext(_network(logits), classes, 3))(_network(logits), classes, classes, 0)
    by_set = loss.begin(LossContext(_network(logits), sets, 3))(_network(logits), classes, sets, 0)
    assert torch.equal(by_class, by_set)


def test_cross_entropy_refuses_sets() -> None:
    with raises("E-CORE-LABEL-SETS"):
        cross_entropy().begin(LossContext(_network(torch.zeros(2, 3)), torch.zeros(2, 3).long(), 3))


def test_positive_weights_come_from_known_labels() -> None:
    labels = torch.tensor([[1, 0], [0, -1], [0, 0], [-1, 1]])
    context = LossContext(torch.nn.Linear(1, 2), labels, 2)  # type: ignore[arg-type]
    assert context.counts.tolist() == [[2, 2], [1, 1]]
    logits = torch.zeros(4, 2)
    loss = one_vs_all(positives="own").begin(context)(_network(logits), labels, labels, 0)
    plain = label_losses(logits, labels)
    weighted = plain.clone()
    weighted[labels == 1] *= 2  # two images without the finding for one with it, for both
    assert float(loss) == pytest.approx(float(weighted.sum(1).mean()))


def test_fisher_of_independent_findings_is_that_of_their_probabilities() -> None:
    logits = torch.randn(5, 3)
    labels = torch.randint(-1, 2, (5, 3))
    probability = logits.sigmoid()
    exact = probability * (1 - probability) * (labels != UNKNOWN)
    total = sum(gradient.square() for gradient in logit_gradients(logits, labels, "expected"))
    assert torch.allclose(torch.as_tensor(total), exact, atol=1e-6)
    (random_signs,) = logit_gradients(logits, labels, "rademacher", torch.Generator().manual_seed(0))
    assert torch.allclose(random_signs.square(), exact, atol=1e-6)
    drawn = torch.zeros(5, 3)
    generator = torch.Generator().manual_seed(0)
    for _ in range(4000):
        drawn += next(iter(logit_gradients(logits, labels, "sampled", generator))).square() / 4000
    assert torch.allclose(drawn, exact, atol=0.02)


# ---- metrics


def _scored(n: int = 400, seed: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    """Return logits in the middle of bins, so that nothing is lost to them, and labels."""
    rng = np.random.default_rng(seed)
    labels = torch.from_numpy(np.nan_to_num(_labels(n, seed), nan=-1)).long()
    raw = torch.from_numpy(rng.normal(size=(n, 3)) + 1.2 * (labels.numpy() == 1))
    centres = (EDGES[1:] + EDGES[:-1]) / 2
    return centres[torch.searchsorted(EDGES, raw.contiguous()) - 1], labels


def test_metrics_are_those_of_scikit_learn() -> None:
    logits, labels = _scored()
    values = label_metrics.compute(label_scores.count_label_scores(logits, labels), NAMES)
    areas, precisions = [], []
    for finding, name in enumerate(NAMES):
        known = labels[:, finding] != UNKNOWN
        truth = labels[known, finding].numpy()
        score = logits[known, finding].numpy()
        areas.append(reference.roc_auc_score(truth, score))
        precisions.append(reference.average_precision_score(truth, score))
        false_rate, true_rate, _ = reference.roc_curve(truth, score, drop_intermediate=False)
        expected = {
            "auroc": areas[-1],
            "average_precision": precisions[-1],
            "f1": reference.f1_score(truth, score > 0),
            "sensitivity": reference.recall_score(truth, score > 0),
            "specificity": reference.recall_score(truth, score > 0, pos_label=0),
            "sensitivity_at_90": true_rate[false_rate <= 0.1 + 1e-9].max(),
            "sensitivity_at_80": true_rate[false_rate <= 0.2 + 1e-9].max(),
        }
        for metric, value in expected.items():
            found = values[f"{metric}:{name}"]
            assert found is not None and found.value == pytest.approx(value, abs=1e-12), (metric, name)
            assert found.low is not None and found.high is not None and found.low <= value <= found.high
    known = (labels != UNKNOWN).numpy()
    truth = labels.numpy()[known]
    score = logits.numpy()[known]
    expected = {
        "auroc": np.mean(areas),
        "average_precision": np.mean(precisions),
        "auroc_micro": reference.roc_auc_score(truth, score),
        "average_precision_micro": reference.average_precision_score(truth, score),
        "log_loss": float(image_losses(logits, labels).mean()),
    }
    for metric, value in expected.items():
        found = values[metric]
        assert found is not None and found.value == pytest.approx(value, abs=1e-8), metric


def test_accuracy_is_the_subset_accuracy_of_scikit_learn() -> None:
    logits, labels = _scored()
    labels = labels.clamp(min=0)  # scikit-learn knows no unknown labels
    found = label_metrics.compute(label_scores.count_label_scores(logits, labels), NAMES)["accuracy"]
    assert found is not None
    assert found.value == pytest.approx(reference.accuracy_score(labels.numpy(), (logits > 0).numpy()), abs=1e-12)


def test_values_of_exact_scores_lie_within_the_stated_error_of_bins() -> None:
    rng = np.random.default_rng(5)
    for spread in (0.001, 0.01, 1.0):
        labels = torch.from_numpy((rng.random((200, 2)) < 0.3).astype(int))
        logits = torch.from_numpy(spread * (rng.normal(size=(200, 2)) + labels.numpy()))
        values = label_metrics.compute(label_scores.count_label_scores(logits, labels), ("a", "b"))
        for finding, name in enumerate("ab"):
            truth, score = labels[:, finding].numpy(), logits[:, finding].numpy()
            false_rate, true_rate, _ = reference.roc_curve(truth, score, drop_intermediate=False)
            exact = {
                "auroc": reference.roc_auc_score(truth, score),
                "average_precision": reference.average_precision_score(truth, score),
                "sensitivity_at_90": true_rate[false_rate <= 0.1 + 1e-9].max(),
            }
            for metric, value in exact.items():
                found = values[f"{metric}:{name}"]
                assert found is not None
                assert abs(found.value - value) <= found.binned + 1e-9, (metric, spread)


def test_sums_of_parts_are_the_sums_of_the_whole() -> None:
    logits, labels = _scored()
    whole = label_scores.count_label_scores(logits, labels)
    parts = [label_scores.count_label_scores(logits[i::3], labels[i::3]) for i in range(3)]
    merged = merge_scores(parts, 3, label_scores.layouts(3))
    assert all(torch.equal(whole[name], merged[name]) for name in whole)
    assert not sums.disagree(whole)
    whole["histogram"][0, 0, 0] += 1
    assert sums.disagree(whole)


def test_a_finding_that_is_nowhere_present_has_no_metrics_and_counts_in_no_mean() -> None:
    logits, labels = _scored()
    labels[:, 2] = 0
    values = label_metrics.compute(label_scores.count_label_scores(logits, labels), NAMES)
    assert values["auroc:nodule"] is None and values["sensitivity_at_90:nodule"] is None
    means = [values[f"auroc:{name}"] for name in NAMES[:2]]
    assert values["auroc"].value == pytest.approx(np.mean([metric.value for metric in means]))  # type: ignore[union-attr]


# ---- runs


METRICS = ["accuracy", "auroc", "average_precision", "sensitivity_at_90", "calibration_error", "log_loss"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "algorithm", [fg.fedavg(), fg.scaffold(), fg.fedprox(), fg.fedova(positives="federation")], ids=lambda a: a.name
)
def test_training_learns_findings(algorithm: Any) -> None:
    result = fg.run(algorithm, CNN, _clients(), rounds=4, metrics=METRICS, select="auroc")
    assert result.summary["metrics"]["auroc"]["value"] > 0.8


@pytest.mark.parametrize("algorithm", [fg.fedlc(), fg.moon(), fg.feddisco(), fg.fedncm()], ids=lambda a: a.name)
def test_algorithms_of_classes_are_refused_before_work_starts(algorithm: Any, tmp_path: Path) -> None:
    with raises("E-RUN-LABEL-SETS"):
        fg.run(algorithm, CNN, _clients(), rounds=1, folder=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_metrics_of_classes_are_refused() -> None:
    with raises("E-METRICS-UNKNOWN", metric="top5"):
        fg.run(fg.fedavg(), CNN, _clients(), rounds=1, metrics=["top5"])


# ---- sources


def _written(folder: Path, labels: np.ndarray) -> list[str]:
    """Write images as PNG files and return their names."""
    from PIL import Image

    names = []
    for row, pixels in enumerate(_images(labels)):
        names.append(f"scan{row:03}.png")
        Image.fromarray(pixels).save(folder / names[-1])
    return names


def _cell(value: float) -> str:
    return "" if np.isnan(value) else str(int(value))


def test_the_same_findings_from_csv_parquet_and_datasets(tmp_path: Path) -> None:
    import datasets
    import pyarrow as pa
    import pyarrow.parquet as pq

    labels = _labels(60)
    names = _written(tmp_path, labels)
    lines = ["image,edema,hospital,mass,nodule"]
    for name, row in zip(names, labels.tolist(), strict=True):
        lines.append(f"{name},{_cell(row[0])},north,{_cell(row[1])},{_cell(row[2])}")
    (tmp_path / "labels.csv").write_text("\n".join(lines) + "\n")
    columns: dict[str, Any] = {"image": [{"bytes": (tmp_path / name).read_bytes(), "path": name} for name in names]}
    for number, name in enumerate(NAMES):
        columns[name] = [None if np.isnan(value) else int(value) for value in labels[:, number].tolist()]
    pq.write_table(pa.table(columns), tmp_path / "scans.parquet")
    found = [
        fg.data.table(tmp_path, findings=NAMES, site="hospital", seed=3),
        fg.data.parquet(tmp_path / "scans.parquet", findings=NAMES, seed=3),
        fg.data.dataset(datasets.Dataset.from_dict(columns), findings=NAMES, seed=3),
    ]
    expected = fg.data.arrays(_images(labels), labels, classes=NAMES, seed=3)
    for data in found:
        assert data.classes == NAMES
        assert (data.train.findings == expected.train.findings).all()
    assert found[0].train.sites is not None and set(found[0].train.sites) == {"north"}


def test_lists_in_datasets_are_label_sets() -> None:
    import datasets

    images = list(np.zeros((40, 8, 8, 3), np.uint8))
    lists = [[0, 2], [], [1], None] * 10
    data = datasets.Dataset.from_dict({"image": images, "label": lists})
    made = fg.data.dataset(data, classes=NAMES, test_share=0.25)
    patterns = np.unique(np.concatenate([made.train.findings, made.test.findings]), axis=0).tolist()
    assert patterns == [[-1, -1, -1], [0, 0, 0], [0, 1, 0], [1, 0, 1]]
    with raises("E-DATA-FINDING-NAMES"):
        fg.data.dataset(data)


def test_a_table_with_classes_and_what_is_wrong_with_tables(tmp_path: Path) -> None:
    names = _written(tmp_path, np.zeros((30, 3)))
    rows = [f"{name},{'cat' if row % 2 else 'dog'},{'test' if row > 20 else 'train'}" for row, name in enumerate(names)]
    (tmp_path / "labels.csv").write_text("image,label,split\n" + "\n".join(rows) + "\n")
    data = fg.data.table(tmp_path / "labels.csv")
    assert data.classes == ("cat", "dog") and (len(data.train), len(data.test)) == (21, 9)
    with raises("E-DATA-COLUMN", column="edema"):
        fg.data.table(tmp_path, findings=["edema", "label"])
    with raises("E-DATA-LABEL-SET-VALUE", column="label"):
        fg.data.table(tmp_path, findings=["label", "split"])
    (tmp_path / "labels.csv").write_text("image,label\na.png\n")
    with raises("E-DATA-TABLE"):
        fg.data.table(tmp_path)


# ---- delivery


@pytest.mark.slow
def test_thresholds_come_from_validation_and_the_exported_model_says_the_same(tmp_path: Path) -> None:
    """A run from a CSV file, its predictions, and the exported folder as transformers and fedgraft read it."""
    import json

    from transformers import AutoModelForImageClassification

    from fedgraft.config.load import load
    from fedgraft.runs.deliver import export_run
    from fedgraft.runs.loop import run
    from fedgraft.runs.predict import evaluate_run, predictor

    labels = _labels(240)
    names = _written(tmp_path, labels)
    lines = ["image,edema,mass,nodule"]
    for name, row in zip(names, labels.tolist(), strict=True):
        lines.append(",".join([name, *map(_cell, row)]))
    (tmp_path / "labels.csv").write_text("\n".join(lines) + "\n")
    options = ["model.name=tiny", "data.source=table", f"data.path={tmp_path}", "data.image_size=16"]
    options += ['data.findings=["edema","mass","nodule"]', "partition.clients=2", "rounds.total=1", "local.lr=0.01"]
    summary = run(load(None, [*options, 'metrics=["auroc"]', "workers=1"]), tmp_path / "run", console=False)
    thresholds = summary["thresholds"]
    assert set(thresholds) == set(NAMES) and all(0 < value < 1 for value in thresholds.values())
    files = [tmp_path / name for name in names[:20]]
    by_run = predictor(tmp_path / "run")(files)
    for prediction in by_run:
        said = tuple(name for name in NAMES if prediction.scores[name] > thresholds[name])  # type: ignore[index]
        assert prediction.findings == said  # type: ignore[attr-defined]
    assert len({prediction.findings for prediction in by_run}) > 1  # type: ignore[attr-defined]
    export_run(tmp_path / "run", tmp_path / "exported")
    by_export = predictor(tmp_path / "exported")(files)
    assert [item.findings for item in by_export] == [item.findings for item in by_run]  # type: ignore[attr-defined]
    assert (
        json.loads((tmp_path / "exported" / "config.json").read_text())["problem_type"] == "multi_label_classification"
    )
    assert "## Thresholds" in (tmp_path / "exported" / "README.md").read_text()
    model = AutoModelForImageClassification.from_pretrained(tmp_path / "exported")
    pixels = torch.zeros(2, 3, 16, 16)
    targets = torch.tensor([[1.0, 0.0, 1.0], [0.0, 0.0, 0.0]])
    output = model(pixel_values=pixels, labels=targets)  # transformers' own loss for several labels
    assert float(output.loss.detach()) == pytest.approx(
        float(label_losses(output.logits.detach(), targets.long()).mean()), rel=1e-5
    )
    with raises("E-RUN-EXPORT-KIND"):
        export_run(tmp_path / "run", tmp_path / "edit", "edit")
    measured = evaluate_run(tmp_path / "run")
    assert measured.metrics["auroc"].value == pytest.approx(summary["metrics"]["auroc"]["value"])  # type: ignore[union-attr]


def ridge_is_that_of_the_known_labels() -> None:
    """The ridge head of each finding is the one of the images alone that say it, by the textbook formula."""
    network = ToyNetwork()
    network.label_sets = True
    draw = torch.Generator().manual_seed(2)
    features = torch.randn(90, network.width, generator=draw)
    labels = torch.randint(-1, 2, (90, 3), generator=draw)
    labels[:, 0] = labels[:, 0].abs()  # one finding that every image says
    rows = {0: torch.arange(50), 1: torch.arange(50, 90)}
    examples = FeatureExamples(features, labels, network.depth)
    context = ClientContext(network, select(network, lambda name: True), examples, rows.__getitem__, 0)

    class Summing:
        """What `Sums` does in the clear."""

        def ask(self, action: Any, settings: Any = None) -> dict[str, torch.Tensor]:
            total: dict[str, torch.Tensor] = {}
            for client in rows:
                request = Request("toy", -1, client, action.name, settings=settings or {})
                action.validate(request, None, context)
                response, _ = action.work(request, None, context, {})
                assert action.implausible(response) == ""
                for name, tensor in response.sums.items():
                    total[name] = total.get(name, 0) + tensor
            return total

    scorer = head_init.LocalScorer(features, labels)
    head, penalty = head_init.ridge_head(Summing(), 0.1, scorer)  # type: ignore[arg-type]
    assert penalty == 0.1
    for finding in range(3):
        known = labels[:, finding] != UNKNOWN
        z = torch.cat([features[known].double(), torch.ones(int(known.sum()), 1)], 1)
        damping = 0.1 * (z[:, :-1] ** 2).sum(0).mean() * torch.eye(z.shape[1], dtype=torch.float64)
        damping[-1, -1] = 0
        expected = torch.linalg.solve(z.T @ z + damping, z.T @ (labels[known, finding].double() - 0.5))
        torch.testing.assert_close(head[finding], expected, rtol=1e-10, atol=1e-12)


def test_ridge_leaves_unknown_labels_out(monkeypatch: pytest.MonkeyPatch) -> None:
    ridge_is_that_of_the_known_labels()
    whole = lambda sums, statistics: statistics["gram"].expand(3, -1, -1).clone()  # noqa: E731
    monkeypatch.setattr(head_init, "known_grams", whole)  # as it was: an unknown label was a target of zero
    with pytest.raises(AssertionError):
        ridge_is_that_of_the_known_labels()


def test_thresholds_are_those_of_the_largest_youden_index() -> None:
    logits, labels = _scored()
    found = label_metrics.best_thresholds(label_scores.count_label_scores(logits, labels), NAMES)
    for finding, name in enumerate(NAMES):
        known = labels[:, finding] != UNKNOWN
        truth, score = labels[known, finding].numpy(), logits[known, finding].numpy()
        false_rate, true_rate, _ = reference.roc_curve(truth, score, drop_intermediate=False)
        said = 1 / (1 + np.exp(-score)) > found[name]
        reached = said[truth == 1].mean() - said[truth == 0].mean()
        assert reached == pytest.approx((true_rate - false_rate).max(), abs=1e-9)


# ---- protection


@pytest.mark.slow
def test_a_secure_run_trains_as_the_clear_one() -> None:
    """The same images and streams: models differ by fixed-point rounding only."""
    losses = []
    for algorithm in (fg.fedavg(), fg.secure(fg.fedavg())):
        result = fg.run(algorithm, CNN, _clients(), rounds=2, metrics=METRICS, fraction=1.0)
        losses.append(result.summary["metrics"]["log_loss"]["value"])
    assert losses[1] == pytest.approx(losses[0], abs=1e-3)


OF_CLASSES = ("fedlc", "moon", "feddisco", "fedncm", "fedcof", "fedlda")
"""Algorithms that need one class per image."""


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(fg.algorithms.ALGORITHMS))
def test_every_algorithm_trains_on_findings_to_the_same_bytes_or_refuses_them(name: str) -> None:
    options = {"fedalign": {"probe": 150}, "fedshibu_probe": {"probe": 16}}.get(name, {})
    algorithm = fg.algorithms.ALGORITHMS[name](**options)
    images = {"fedalign": 2100, "fedshibu_probe": 240}.get(name, 90)  # their probes need validation images
    clients = 1 if name == "central" else 3
    if name in OF_CLASSES:
        with raises("E-RUN-LABEL-SETS"):
            fg.run(algorithm, "tiny", _clients(90, clients), rounds=1)
        return
    states = []
    for _ in range(2):
        result = fg.run(algorithm, "tiny", _clients(images, clients), rounds=1, workers=1)
        assert np.isfinite(result.summary["test"]["loss"])
        states.append(result.network.state_dict())
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])


def test_findings_of_few_images_are_left_out_of_hidden_sums() -> None:
    labels = torch.zeros(40, 3, dtype=torch.int64)
    labels[:4, 0] = 1  # four images with the finding
    labels[:5, 1] = 1
    labels[4:, 2] = 1  # four without
    examples = FeatureExamples(torch.zeros(40, 2), labels, 0)
    masked = without_small_findings(examples, torch.arange(40), 5)
    assert (masked.labels != UNKNOWN).any(0).tolist() == [False, True, False]
    assert torch.equal(examples.labels, labels)
