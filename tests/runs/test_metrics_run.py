"""Metrics of whole runs: equal to scikit-learn on the delivered model, by client, and the choice of the best round."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from sklearn import metrics as sklearn
from tests.support.errors import raises
from tests.support.tiny import Open, tensors_of, tiny, without_pictures
from torch import Tensor

from fedgraft.algorithms.algorithm import vary
from fedgraft.client.actions import action_named
from fedgraft.client.handle import handle
from fedgraft.core.errors import FedgraftError
from fedgraft.core.messages import Request, Response
from fedgraft.metrics import label_metrics, metrics, scores
from fedgraft.metrics.names import METRIC_NAMES
from fedgraft.privacy.protection import CLEAR
from fedgraft.runs.adapted import adapted
from fedgraft.runs.loop import run
from fedgraft.runs.measure import validated_sums
from fedgraft.server.secure_sum import Sums

ASKED = 'metrics=["balanced_accuracy","sensitivity","auroc","calibration_error","confusion"]'


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("run") / "metrics"
    return folder, run(tiny(ASKED, "select=balanced_accuracy", "local.lr=0.3"), folder, console=False)


def test_the_confusion_matrix_comes_with_any_metric(tmp_path: Path) -> None:
    summary = run(tiny("metrics=auroc", "local.lr=0.3"), tmp_path / "run", console=False)
    assert sum(map(sum, summary["confusion"])) == summary["metrics"]["auroc"]["n"]
    assert "confusion" not in run(tiny("local.lr=0.3"), tmp_path / "none", console=False)


@torch.inference_mode()
def predictions(folder: Path, client: int | None = None) -> tuple[Tensor, Tensor]:
    """Scores and labels of the delivered model on the test images, of one client or all."""
    run_again = adapted(folder)
    tests = run_again.setup.task.test_images
    rows = torch.arange(len(tests)) if client is None else run_again.setup.task.data.test_rows(client)
    run_again.network.eval()
    return run_again.network(tests.batch(rows), 0).softmax(1), tests.labels[rows]


def test_a_run_tells_what_scikit_learn_computes_from_its_predictions(done: tuple[Path, dict[str, Any]]) -> None:
    folder, summary = done
    scored, labels = predictions(folder)
    reported = summary["metrics"]
    assert reported["balanced_accuracy"]["value"] == pytest.approx(
        sklearn.balanced_accuracy_score(labels, scored.argmax(1)), abs=1e-9
    )
    exact = sklearn.roc_auc_score(labels, scored, multi_class="ovr", average="macro")
    assert abs(reported["auroc"]["value"] - exact) <= reported["auroc"]["binned"] + 1e-9
    assert summary["confusion"] == sklearn.confusion_matrix(labels, scored.argmax(1)).tolist()
    three = reported["sensitivity:3"]
    assert (three["hits"], three["n"]) == (int((scored.argmax(1)[labels == 3] == 3).sum()), int((labels == 3).sum()))
    assert three["low"] < three["value"] < three["high"]
    assert sum(b["accuracy"]["n"] for b in summary["reliability"]) == len(labels)
    assert "specificity:3" not in reported  # not asked for


def test_every_client_has_its_own_metrics(done: tuple[Path, dict[str, Any]]) -> None:
    folder, summary = done
    assert set(summary["clients"]) == {"0", "1", "2"}
    for client in range(3):
        scored, labels = predictions(folder, client)
        balanced = summary["clients"][str(client)]["balanced_accuracy"]
        assert balanced["value"] == pytest.approx(sklearn.balanced_accuracy_score(labels, scored.argmax(1)), abs=1e-9)
        assert balanced["n"] == len(labels)
    page = (folder / "report.html").read_text().replace("&nbsp;", " ")
    assert "Confusion and calibration" in page and f"({three_of(summary)}" in page


def three_of(summary: dict[str, Any]) -> str:
    reported = summary["metrics"]["sensitivity:3"]
    return f"{reported['hits']} of {reported['n']}; "


def test_the_chosen_metric_picks_the_round_and_the_delivered_vector(tmp_path: Path) -> None:
    """With the log loss, less is better; the run's own record says which round that was."""
    options = ["select=log_loss", "local.lr=0.5", "rounds.total=3"]
    with without_pictures():
        summary = run(tiny(*options), tmp_path / "a", console=False)
        stopped = tiny(*options, "rounds.total=2")
        assert stopped.digest != tiny("rounds.total=2", "local.lr=0.5").digest
    lines = (tmp_path / "a" / "metrics.jsonl").read_text().splitlines()
    losses = {line["round"]: line["metrics"]["log_loss"] for line in map(json.loads, lines)}
    best = min(losses, key=lambda r: losses[r])
    assert summary["best_round"] == best and summary["validation"]["log_loss"] == pytest.approx(losses[best])


def test_without_metrics_a_run_keeps_its_identity_and_its_bytes(tmp_path: Path) -> None:
    """Counting changes nothing that is trained."""
    with without_pictures():
        run(tiny(), tmp_path / "plain", console=False)
        run(tiny(ASKED), tmp_path / "counted", console=False)
    assert torch.equal(tensors_of(tmp_path / "plain")["vector"], tensors_of(tmp_path / "counted")["vector"])


def test_a_metric_of_a_class_that_is_not_there_is_refused_before_work(tmp_path: Path) -> None:
    with raises("E-METRICS-UNKNOWN", metric="f1:melanoma"):
        run(tiny("select=f1:melanoma"), tmp_path / "x", console=False)
    assert not (tmp_path / "x").exists()
    with pytest.raises(FedgraftError, match="sensitivity:CLASS"):
        tiny("select=sensitivity")


def test_the_config_names_every_metric() -> None:
    assert set(METRIC_NAMES) == {*metrics.NAMES, "confusion", *label_metrics.NAMES}


def reply_of(**changed: Tensor) -> Response:
    logits, labels = torch.randn(20, 3, generator=torch.Generator().manual_seed(1)), torch.arange(20) % 3
    return Response("r", 0, 7, sums={**scores.count_scores(logits, labels, 3), **changed})


@pytest.mark.parametrize(
    "bad",
    [
        {"confusion": torch.full((3, 3), -1.0, dtype=torch.float64)},
        {"confusion": torch.zeros(3, 3, dtype=torch.float64)},
        {"histogram": torch.zeros(2, 3, 5, dtype=torch.float64)},
        {"loss": torch.full((2,), torch.nan, dtype=torch.float64)},
        {"calibration": torch.ones(3, 15, dtype=torch.float32)},
    ],
)
def test_sums_that_cannot_be_are_refused_by_name(bad: dict[str, Tensor]) -> None:
    validated_sums(reply_of(), scores.sum_layouts(3))
    with pytest.raises(FedgraftError) as caught:
        validated_sums(reply_of(**bad), scores.sum_layouts(3))
    assert caught.value.code in {"E-RUN-METRIC-SUMS", "E-RUN-METRIC-IMAGES"} and caught.value.fields == {"client": 7}


def test_the_secure_sum_of_scores_is_the_sum_in_the_clear() -> None:
    """Clients that hold images out, asked through the five stages: the total has the very counts, rounded losses."""
    made = Open(tiny("privacy.aggregation=secure", "privacy.smallest_group=1", "model.head=random"))
    made.context.held = lambda client: made.data.validation_rows[client::3]
    engine, vector = made.engine(), made.begin().vector
    asking = Sums(engine.exchange, "r", range(3), made.network, made.algorithm.privacy)
    hidden = asking.ask(action_named("scores"), vector, {"split": "validation"})
    request = [Request("r", 0, k, "scores", "", vector, {}, {"split": "validation"}) for k in range(3)]
    in_the_clear, made.context.policies = vary(made.algorithm, privacy=CLEAR), ()
    clear = scores.merge_scores(
        [handle(o, in_the_clear, made.context, {})[0].sums for o in request], made.network.classes
    )
    assert all(torch.equal(hidden[name], clear[name]) for name in ("confusion", "histogram", "top5"))
    assert all(torch.allclose(hidden[name], clear[name], atol=3 / 16) for name in ("calibration", "loss"))
