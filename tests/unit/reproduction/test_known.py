"""Fine-tuning rates by arm, and what mixing weights know of shared classes (`reproduction/known.py`)."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from reproduction.known import BATCH, MOMENTUM, PASSES, accuracies, at_best_rate, finetune_heads, overlap_correlation

from fedgraft.aggregate.mixing import mixing_matrix
from fedgraft.aggregate.similarity import crsm
from fedgraft.core.rng import torch_stream


def test_every_rate_takes_the_steps_of_torch() -> None:
    stream = torch.Generator().manual_seed(0)
    features = torch.randn(103, 6, generator=stream)
    labels = torch.randint(0, 4, (103,), generator=stream)
    start = torch.nn.Linear(6, 4)
    with torch.no_grad():
        start.weight.copy_(torch.randn(4, 6, generator=stream))
        start.bias.zero_()
    rates = (0.0, 0.01, 0.1)
    weights, biases = finetune_heads(start.weight.detach(), start.bias.detach(), (features, labels), rates, 7)
    for at, rate in enumerate(rates):
        head = torch.nn.Linear(6, 4)
        head.load_state_dict(start.state_dict())
        optimizer = torch.optim.SGD(head.parameters(), lr=rate, momentum=MOMENTUM)
        shuffle = torch_stream(7, "finetune")
        for _ in range(PASSES):
            for batch in torch.randperm(103, generator=shuffle).split(BATCH):
                optimizer.zero_grad()
                torch.nn.functional.cross_entropy(head(features[batch]), labels[batch]).backward()
                optimizer.step()
        torch.testing.assert_close(weights[at], head.weight.detach(), atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(biases[at], head.bias.detach(), atol=1e-6, rtol=1e-5)
    measured = accuracies(weights, biases, (features, labels))
    expected = 100 * (start(features).argmax(1) == labels).float().mean()
    assert measured[0] == pytest.approx(float(expected)) and measured[2] > measured[0]
    assert all(math.isnan(x) for x in accuracies(weights, biases, (features[:0], labels[:0])))


def test_the_rate_is_chosen_on_validation_and_test_images_choose_nothing() -> None:
    runs: dict[int, dict[str, Any]] = {
        1: {"rates": [0.0, 0.01, 0.1], "validation": [50.0, 60.0, 40.0], "test": [90.0, 55.0, 95.0]},
        2: {
            "rates": [0.0, 0.01, 0.1],
            "validation": [50.0, 45.0, 40.0],
            "test": [91.0, 56.0, 96.0],
            "correlation": 0.5,
        },
    }
    runs[2]["correlation"] = 0.5
    values, row = at_best_rate(runs)
    assert values["finetuned"] == {1: 55.0, 2: 56.0} and values["personal"] == {1: 90.0, 2: 91.0}
    assert values["best"] == {1: 60.0, 2: 45.0} and values["correlation"] == {2: 0.5}
    assert row["fine-tuning rate"] == "0.01" and row["test at 0.1"] == "95.5" and row["own weight"] == "–"
    for run in runs.values():
        run["validation"] = [10.0, 20.0, 30.0]
    assert at_best_rate(runs)[1]["fine-tuning rate"] == "0.1 (the largest tried)"


def test_weights_that_know_the_groups_correlate_and_constants_have_no_correlation() -> None:
    counts = np.zeros((6, 4))
    counts[:3, :2] = 5.0
    counts[3:, 2:] = 5.0
    counts[:, 0] += [0, 1, 2, 0, 0, 0]  # clients of different size: the weight of size is no knowledge
    examples = torch.from_numpy(counts.sum(1))
    knows = mixing_matrix(torch.from_numpy(counts @ counts.T > 0).double(), examples)
    assert overlap_correlation(knows, counts) > 0.95
    assert math.isnan(overlap_correlation(mixing_matrix(torch.full((6, 6), 0.3), examples), counts))
    assert math.isnan(overlap_correlation(mixing_matrix(torch.eye(6), examples), counts))


def test_rows_that_are_shuffled_lose_what_pairs_of_rows_say() -> None:
    """Two clients with nearly the same rows: CKA near 1; in random orders it is that of unrelated rows."""
    stream = torch.Generator().manual_seed(1)
    rows = torch.randn(64, 8, generator=stream)
    alike = [rows, rows + 0.05 * torch.randn(64, 8, generator=stream)]
    unrelated = [rows, torch.randn(64, 8, generator=stream)]
    paired = float(crsm(alike, "cka_linear")[0, 1])
    shuffled = float(crsm(alike, "cka_shuffled")[0, 1])
    chance = float(crsm(unrelated, "cka_linear")[0, 1])
    assert paired > 0.95 and shuffled < 0.4 and abs(shuffled - chance) < 0.15
    assert torch.equal(crsm(alike, "cka_shuffled"), crsm(alike, "cka_shuffled"))
