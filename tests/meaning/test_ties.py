"""Equal scores: every path that names or counts predictions lets the class of the lowest number win, as argmax does."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from tests.support.tiny import Open, tiny

from fedgraft.client.actions.evaluation import count_models
from fedgraft.client.context import features
from fedgraft.core.messages import Request
from fedgraft.metrics.evaluate import evaluate, evaluate_with_sums, evaluation_of
from fedgraft.metrics.metrics import compute
from fedgraft.runs.head_init import LocalScorer
from fedgraft.runs.predict import Prediction, Predictor

BIASES = {
    "all classes tie": torch.zeros(10),
    "the last six tie at the top": torch.tensor([0.0] * 4 + [1.0] * 6),
    "two pairs": torch.tensor([0.0, 2.0, 0.0, 2.0, 1.0, 1.0, 1.0, 1.0, 0.0, 0.0]),
}


def by_hand(bias: torch.Tensor, labels: torch.Tensor) -> tuple[float, float]:
    """Accuracy and accuracy within five guesses of a model that says the same of every image."""
    request = sorted(range(len(bias)), key=lambda c: (-float(bias[c]), c))
    right = sum(int(label) == request[0] for label in labels)
    near = sum(int(label) in request[:5] for label in labels)
    return right / len(labels), near / len(labels)


@pytest.mark.parametrize("name", BIASES)
def test_every_path_breaks_ties_alike(name: str) -> None:
    bias = BIASES[name]
    opened = Open(tiny("trainable.kind=head", "data.validation=0.5"))
    network, context = opened.network, opened.context
    with torch.no_grad():
        network.head.weight.zero_()
        network.head.bias.copy_(bias)
    examples, rows = context.examples, opened.data.validation_rows
    rows = torch.as_tensor(rows)
    accuracy, top5 = by_hand(bias, examples.labels[rows])
    assert 0 < top5 < 1

    plain = evaluate(network, examples, rows)
    assert (plain.accuracy, plain.top5) == pytest.approx((accuracy, top5))
    both, sums = evaluate_with_sums(network, examples, rows)
    from_sums = evaluation_of(sums)
    assert (both.accuracy, both.top5) == pytest.approx((accuracy, top5))
    assert (from_sums.accuracy, from_sums.top5) == pytest.approx((accuracy, top5))
    metrics = compute(sums, tuple("0123456789"))
    assert metrics["accuracy"].value == pytest.approx(accuracy)
    assert metrics["top5"].value == pytest.approx(top5)

    held = context.rows(0)
    accuracy, top5 = by_hand(bias, examples.labels[held])
    shown = opened.setup.backbone_context
    head = torch.cat([network.head.weight, network.head.bias[:, None]], 1).detach().double()
    seen = torch.cat([z for z, _ in features(shown, held)])
    assert LocalScorer(seen, examples.labels[held])([head])[0][0] == pytest.approx(accuracy)
    shown.held = lambda client: held
    request = Request("r", -1, 0, "count", auxiliary={"heads": head[None]})
    told = count_models(request, shown)["counts"][0] / len(held)
    assert (float(told[0]), float(told[1])) == pytest.approx((accuracy, top5))


def test_a_predicted_label_is_the_first_of_equal_classes_and_leads_its_list(tmp_path: Path) -> None:
    opened = Open(tiny("trainable.kind=head"))
    network = opened.network
    path = tmp_path / "image.png"
    Image.fromarray(np.full((16, 16, 3), 99, dtype=np.uint8)).save(path)
    predictor = Predictor(network, tuple("0123456789"), opened.task.transform)
    with torch.no_grad():
        network.head.weight.zero_()
        network.head.bias.copy_(BIASES["the last six tie at the top"])
        found = predictor([path])[0]
        assert found.label == "4" and [name for name, _ in found.top(3)] == ["4", "5", "6"]
        # Logits that differ where probabilities round to the same number: the larger logit is the class.
        network.head.bias.zero_()
        network.head.bias[7] = 1e-9
        found = predictor([path])[0]
    assert found.scores is not None and len(set(found.scores.values())) == 1
    assert found.label == "7" and found.top(1)[0][0] == "7"


def test_a_list_of_guesses_follows_the_scores() -> None:
    assert Prediction("x", "b", 0.5, {"a": 0.1, "b": 0.5, "c": 0.4}).top(2) == [("b", 0.5), ("c", 0.4)]
