"""Evaluation adds results up as they come: its memory does not grow with the number of images."""

from __future__ import annotations

import pytest
import torch

from fedgraft.data.examples import FeatureExamples
from fedgraft.metrics import evaluate as module
from fedgraft.metrics.evaluate import evaluate_with_sums
from fedgraft.models.backbones import load_network
from fedgraft.runs.live_bytes import LiveBytes

CLASSES = 200


def peak(images: int) -> int:
    """The most bytes of tensors at once while so many images are evaluated, four in a batch."""
    network = load_network("features:width=4", CLASSES)
    features = torch.randn(1, 4).expand(images, 4)  # no memory of its own
    examples = FeatureExamples(features, torch.zeros(1, dtype=torch.int64).expand(images), 0)
    with LiveBytes([*network.parameters(), features, examples.labels]) as live:
        evaluate_with_sums(network, examples, torch.arange(images), batch_size=4)
    return live.peak


def test_memory_of_an_evaluation_is_flat_in_the_number_of_images() -> None:
    assert peak(80) < 1.05 * peak(16)


def test_the_test_sees_results_that_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    in_order = module._in_order
    monkeypatch.setattr(module, "_in_order", lambda *given: list(in_order(*given)))
    assert peak(80) > 1.5 * peak(16)
