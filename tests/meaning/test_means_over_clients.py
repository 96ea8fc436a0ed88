"""Means over clients in the record are by examples, and by test images for the weighted accuracy."""

from __future__ import annotations

import pytest
from tests.support.toy import Toy, client_rows

from fedgraft import algorithms as zoo
from fedgraft.core.messages import Response
from fedgraft.runs.measure import accuracy_spread


def test_the_training_loss_of_a_round_is_by_examples() -> None:
    toy = Toy(zoo.fedavg(), per_round=5)
    toy.run(1)
    clients = toy.summary.record["clients"]
    sizes = [len(client_rows(k)) for k in clients["ids"]]
    assert len(set(sizes)) > 1
    by_hand = sum(n * loss for n, loss in zip(sizes, clients["loss"], strict=True)) / sum(sizes)
    unweighted = sum(clients["loss"]) / len(sizes)
    assert toy.summary.record["train_loss"] == pytest.approx(by_hand, rel=1e-9)
    assert abs(by_hand - unweighted) > 1e-4


def test_the_weighted_accuracy_is_by_test_images_and_the_mean_by_clients() -> None:
    responses = [
        Response("r", 1, 0, metrics={"accuracy": 1.0, "count": 10.0}),
        Response("r", 1, 1, metrics={"accuracy": 0.5, "count": 90.0}),
    ]
    found = accuracy_spread(responses)
    assert found["weighted"] == pytest.approx(0.55)
    assert found["mean"] == pytest.approx(0.75)
