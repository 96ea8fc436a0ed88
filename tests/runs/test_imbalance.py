"""Class weights and balanced sampling: against scikit-learn and torch, own and federation, secure, resumed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.utils.class_weight import compute_class_weight
from tests.support.errors import raises
from tests.support.tiny import Open, same_bits, tensors_of, tiny, without_pictures
from torch.nn.functional import cross_entropy as reference

from fedgraft.core.rng import torch_stream
from fedgraft.local.losses import LossContext, balancing, cross_entropy
from fedgraft.local.train import LocalTraining, drawn
from fedgraft.runs.loop import run

LABELS = torch.tensor([0, 0, 0, 0, 1, 1, 3])


def test_weights_are_those_of_scikit_learn_and_absent_classes_weigh_nothing() -> None:
    weights = balancing(torch.bincount(LABELS, minlength=5))
    wanted = compute_class_weight("balanced", classes=np.array([0, 1, 3]), y=LABELS.numpy())
    assert torch.allclose(weights[[0, 1, 3]].double(), torch.from_numpy(wanted)) and weights[[2, 4]].sum() == 0


def test_the_loss_is_torchs_weighted_cross_entropy_by_own_or_federation_counts() -> None:
    logits = torch.randn(7, 5, generator=torch_stream(0, "logits"))
    whole = torch.tensor([10.0, 10, 10, 10, 60])
    network = torch.nn.Linear(1, 1)  # says which device the counts are on
    context = LossContext(network, LABELS, 5, federation=whole)  # type: ignore[arg-type]
    for kind, counts in (("own", context.counts), ("federation", whole)):
        value = cross_entropy(class_weights=kind).begin(context)(lambda x, entry: x, logits, LABELS, 0)  # type: ignore[arg-type]
        assert torch.equal(value, reference(logits, LABELS, balancing(counts)))
    plain = cross_entropy().begin(context)(lambda x, entry: x, logits, LABELS, 0)  # type: ignore[arg-type]
    assert torch.equal(plain, reference(logits, LABELS))


def test_balanced_sampling_meets_every_class_as_often() -> None:
    rule, rows = LocalTraining(steps=500, batch_size=7, sampling="balanced"), torch.arange(7) + 100
    chances = balancing(torch.bincount(LABELS, minlength=5))[LABELS].double()
    met = torch.bincount(LABELS[drawn(rows, rule, torch_stream(0, "draw"), chances) - 100], minlength=5)
    assert met.sum() == 3500 and met[2] == met[4] == 0
    assert (met[[0, 1, 3]] - 3500 / 3).abs().max() < 4 * (3500 * 2 / 9) ** 0.5  # four standard deviations


@pytest.mark.parametrize("option", ["loss.class_weights=federation", "local.sampling=federation"])
def test_a_run_by_the_federations_counts_is_the_same_secure_and_resumed(option: str, tmp_path: Path) -> None:
    overrides = [option, "partition.kind=dirichlet", "partition.minimum=3"]
    with without_pictures():
        run(tiny(*overrides), tmp_path / "a", console=False)
        run(tiny(*overrides, "rounds.total=1"), tmp_path / "short", console=False)
    saved = tensors_of(tmp_path / "a")
    made = Open(tiny(*overrides, "privacy.aggregation=secure"))
    assert torch.equal(made.context.class_counts, saved["edit/class_counts"])  # the secure sum of counts is exact
    assert torch.equal(saved["edit/class_counts"], torch.from_numpy(made.data.histogram().sum(0)).double())
    assert not same_bits({"v": saved["vector"]}, {"v": tensors_of(tmp_path / "short")["vector"]})


def test_own_and_federation_weights_train_other_models_than_plain(tmp_path: Path) -> None:
    vectors = []
    with without_pictures():
        for i, word in enumerate(["loss.label_smoothing=0.0", "loss.class_weights=own", "local.sampling=balanced"]):
            run(tiny("partition.kind=dirichlet", "partition.minimum=3", word), tmp_path / str(i), console=False)
            vectors.append(tensors_of(tmp_path / str(i))["vector"])
    assert not torch.equal(vectors[0], vectors[1]) and not torch.equal(vectors[0], vectors[2])


def test_what_the_privacy_account_does_not_cover_is_refused() -> None:
    with raises("E-ALGORITHM-COMBINATION"):
        Open(
            tiny(
                "loss.class_weights=federation",
                "privacy.dp.noise=1.0",
                "algorithm.weighting=uniform",
                "rounds.sampling=poisson",
                "privacy.dp.delta=0.01",
            )
        )
    with raises("E-CORE-UNKNOWN-OPTION"):
        Open(tiny("loss.name=calibrated", "loss.class_weights=own"))
