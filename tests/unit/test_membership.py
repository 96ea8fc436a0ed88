"""Membership inference from sums: scikit-learn's areas, Newcombe's intervals, and what a made-up site may send."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score
from torch import Tensor

from fedgraft.metrics import membership
from fedgraft.metrics.membership import BINS, COMMON, RARE

Side = tuple[Tensor, Tensor, Tensor]


def side(bins: Tensor, right: bool = True, rare: bool = False) -> Side:
    return bins, torch.full((len(bins),), right), torch.full((len(bins),), rare)


def both_sides(members: Side, outsiders: Side, smallest: int) -> dict[str, Tensor]:
    return membership.join_sides(membership.side_sums(*members, smallest), membership.side_sums(*outsiders, smallest))


def drawn(images: int, mean: float, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (mean + 12 * torch.randn(images, generator=generator)).round().clamp(0, BINS - 1).long()


@pytest.mark.parametrize("distance", [0.0, 6.0, 30.0])
def test_the_area_is_that_of_scikit_learn(distance: float) -> None:
    members, outsiders = drawn(300, 40, 0), drawn(200, 40 + distance, 1)
    attack = membership.attack(both_sides(side(members), side(outsiders), 1))
    truth = np.concatenate([np.ones(300), np.zeros(200)])
    scores = -np.concatenate([members.numpy(), outsiders.numpy()])
    assert attack.auc is not None
    assert attack.auc.value == pytest.approx(roc_auc_score(truth, scores), abs=1e-12)


def delong_by_pairs(members: Tensor, outsiders: Tensor) -> float:
    """Return the standard error of the area from all pairs of images."""
    wins = (members[:, None] < outsiders).double() + (members[:, None] == outsiders).double() / 2
    variance = wins.mean(1).var() / len(members) + wins.mean(0).var() / len(outsiders)
    return float(variance.sqrt())


def test_the_interval_is_delongs() -> None:
    members, outsiders = drawn(150, 40, 2), drawn(90, 47, 3)
    area = membership.attack(both_sides(side(members), side(outsiders), 1)).auc
    assert area is not None and area.low is not None and area.high is not None
    assert (area.high - area.low) / 2 == pytest.approx(
        1.959963984540054 * delong_by_pairs(members, outsiders), abs=1e-12
    )


def test_the_share_that_is_found_keeps_the_false_alarms() -> None:
    members = torch.tensor([3] * 60 + [50] * 40)
    outsiders = torch.tensor([3] + [10] * 2 + [60] * 197)
    found = membership.attack(both_sides(side(members), side(outsiders), 1)).found
    assert (
        found is not None and found.hits == 60 and found.n == 100
    )  # one false alarm of 200; at bin 10 there are three
    few = membership.attack(both_sides(side(members), side(outsiders[:50]), 1))
    assert few.found is None and few.auc is not None


def test_sums_of_sites_are_those_of_one_place() -> None:
    parts = []
    for seed in range(3):
        parts.append(both_sides(side(drawn(50, 30, seed)), side(drawn(40, 40, 9 + seed)), 1))
    together = membership.merge_membership(parts)
    members = torch.cat([drawn(50, 30, seed) for seed in range(3)])
    outsiders = torch.cat([drawn(40, 40, 9 + seed) for seed in range(3)])
    alone = both_sides(side(members), side(outsiders), 1)
    assert all(torch.equal(together[name], alone[name]) for name in alone)


def test_small_groups_are_left_out() -> None:
    few = side(torch.tensor([1, 2, 3, 4]), rare=True)
    sums = both_sides(few, side(drawn(30, 40, 0), rare=True), 5)
    assert not sums["members"].any() and sums["outsiders"][RARE].sum() == 30
    assert membership.attack(sums).auc is None and membership.gap(sums, RARE).gap is None


def test_a_gap_has_newcombes_interval() -> None:
    """His example (b): 9 of 10 against 3 of 10."""
    low, high = membership.newcombe((9, 10), (3, 10))
    assert low == pytest.approx(0.1705, abs=5e-5) and high == pytest.approx(0.8090, abs=5e-5)


def test_the_gap_tells_rare_classes_from_others() -> None:
    labels = torch.tensor([0] * 40 + [1] * 8)
    rare = torch.from_numpy(membership.rare_classes(np.array([40, 8])))
    is_rare = membership.is_of_rare_class(labels, rare)
    assert is_rare.tolist() == [False] * 40 + [True] * 8
    bins = torch.zeros(48, dtype=torch.int64)
    members = (bins, torch.ones(48, dtype=torch.bool), is_rare)
    outsiders = (bins, ~is_rare, is_rare)
    sums = both_sides(members, outsiders, 5)
    by_heart, usual = membership.gap(sums, RARE).gap, membership.gap(sums, COMMON).gap
    assert by_heart is not None and by_heart.value == 1.0
    assert usual is not None and usual.value == 0.0


def test_losses_of_classes_and_of_findings_have_bins() -> None:
    logits = torch.tensor([[9.0, -9.0], [-9.0, 9.0]])
    right = membership.loss_bins(logits, torch.tensor([0, 1]))
    wrong = membership.loss_bins(logits, torch.tensor([1, 0]))
    assert bool((right < wrong).all()) and int(wrong.max()) < BINS
    findings = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    assert membership.right_answers(logits, findings).all()
    assert membership.is_of_rare_class(findings, torch.tensor([False, True])).tolist() == [False, True]
    assert membership.loss_bins(logits, findings).tolist() != membership.loss_bins(logits, 1 - findings).tolist()


@pytest.mark.parametrize("spoil", ["negative", "fraction", "right"])
def test_sums_that_cannot_be_are_named(spoil: str) -> None:
    sums = membership.side_sums(*side(drawn(30, 40, 0)), 1)
    assert not membership.implausible_side(sums)
    if spoil == "negative":
        sums["losses"][0, 0] = -1
    elif spoil == "fraction":
        sums["losses"][0, 0] += 0.5
    else:
        sums["right"][0] = 31
    assert membership.implausible_side(sums)
