"""MixUp and CutMix: what is mixed, how often, and the loss against one with soft labels."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from tests.support.errors import raises
from tests.support.tiny import CNN, tensors_of, tiny, without_pictures
from torch import Tensor, nn

from fedgraft.local.mixing import MixedBatch, mix
from fedgraft.runs.loop import run


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def images(count: int = 6, size: int = 10) -> Tensor:
    """Image i is i everywhere, so that every pixel says where it came from."""
    return torch.arange(float(count)).view(-1, 1, 1, 1).expand(count, 3, size, size).clone()


def test_mixup_adds_pairs_in_the_shares_of_their_labels() -> None:
    before = images()
    mixed = mix(before, generator(), 1.0, None)
    expected = mixed.share * before + (1 - mixed.share) * before[mixed.partners]
    torch.testing.assert_close(mixed.inputs, expected)
    assert sorted(mixed.partners.tolist()) == list(range(6)) and torch.equal(before, images())


def test_cutmix_pastes_a_box_and_counts_its_pixels() -> None:
    shares = []
    for seed in range(200):
        before = images()
        mixed = mix(before, generator(seed), None, 1.0)
        pasted = mixed.inputs != before
        for row in range(6):
            if mixed.partners[row] == row:
                continue
            assert (mixed.inputs[row][pasted[row]] == mixed.partners[row]).all()
            rows, columns = torch.where(pasted[row, 0])
            if len(rows):
                box = (rows.max() - rows.min() + 1) * (columns.max() - columns.min() + 1)
                assert box == len(rows)  # a box without holes
            assert 1 - len(rows) / 100 == pytest.approx(mixed.share)
        shares.append(mixed.share)
    assert 0.6 < np.mean(shares) < 0.85 and min(shares) < 0.5 and max(shares) == 1.0  # boxes are cut at the edges


def test_shares_are_beta_distributed_and_both_take_turns() -> None:
    from scipy.stats import kstest

    shares = []
    boxes = 0
    for seed in range(400):
        mixed = mix(images(2), generator(seed), 0.4, None)
        shares.append(mixed.share)
        either = mix(images(), generator(seed), 0.4, 1.0)
        values = either.inputs.reshape(6, -1)
        boxes += int(torch.equal(values, values.round()))
    assert kstest(shares, "beta", args=(0.4, 0.4)).pvalue > 0.01
    assert 150 < boxes < 260  # a MixUp share of nearly 1 looks like a box


def test_the_loss_is_that_of_soft_labels_in_one_pass() -> None:
    calls = []

    class Net(nn.Linear):
        def forward(self, inputs: Tensor, entry: int = 0) -> Tensor:  # type: ignore[override]
            calls.append(entry)
            return super().forward(inputs.mean((2, 3)))

    network = Net(3, 4)
    batch = mix(torch.randn(5, 3, 4, 4, generator=generator()), generator(1), 1.0, None)
    labels = torch.tensor([0, 1, 2, 3, 0])
    loss = batch.loss(lambda n, x, y, e: nn.functional.cross_entropy(n(x, e), y), network, labels, 0)  # type: ignore[arg-type]
    assert calls == [0]
    one_hot = nn.functional.one_hot(labels, 4).float()
    soft = batch.share * one_hot + (1 - batch.share) * one_hot[batch.partners]
    torch.testing.assert_close(loss, nn.functional.cross_entropy(network(batch.inputs), soft))
    wrong = MixedBatch(batch.inputs, torch.arange(5), batch.share)  # the broken variant: labels are not mixed
    assert not torch.isclose(
        loss, wrong.loss(lambda n, x, y, e: nn.functional.cross_entropy(n(x, e), y), network, labels, 0)
    )  # type: ignore[arg-type]


def test_features_cannot_be_mixed() -> None:
    with raises("E-LOCAL-MIXING-PIXELS"):
        mix(torch.randn(4, 8), generator(), 1.0, None)


def test_a_run_mixes_repeats_and_resumes(tmp_path: Path) -> None:
    """The same bytes twice, others than without mixing; evaluation does not mix."""

    def bytes_of(name: str, *overrides: str) -> dict[str, Tensor]:
        with without_pictures():
            run(tiny(CNN, "rounds.total=2", *overrides), tmp_path / name, console=False)
        return tensors_of(tmp_path / name)

    plain = bytes_of("plain")["vector"]
    for option in ("local.mixup=0.4", "local.cutmix=1.0"):
        first = bytes_of(f"{option} first", option)["vector"]
        assert torch.equal(first, bytes_of(f"{option} second", option, "workers=2")["vector"])
        assert not torch.equal(first, plain)
