"""Masks: the k smallest scores of many, and the mean over all rounds of a calibration."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from fedgraft.edit.calibrate import average, calibrate
from fedgraft.edit.choose import choose


@pytest.mark.parametrize("k", [1, 2, 3, 100, 2500, 4998, 4999, 5000])
def test_exactly_the_smallest_scores_are_chosen(k: int) -> None:
    scores = np.random.default_rng(k).permutation(5000).astype(np.float32)
    mask = choose({"w": torch.from_numpy(scores)}, k=k)
    np.testing.assert_array_equal(np.sort(scores[mask.tensors["w"].numpy()]), np.arange(k))


@pytest.mark.parametrize("rounds", [1, 2, 3])
def test_every_round_of_a_calibration_counts(rounds: int) -> None:
    drawn = torch.rand(3, 200, generator=torch.Generator().manual_seed(0))

    def scores(round: int) -> dict[str, Tensor]:
        return {"w": drawn[round - 1]}

    mask = calibrate(scores, "least_sensitive", 0.25, average(rounds)).mask
    mean = drawn[:rounds].double().mean(0)
    assert set(mask.tensors["w"].nonzero().ravel().tolist()) == set(mean.argsort()[:50].tolist())
