"""The mean of changes: exact laws, order, masks, and a golden round derived by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.errors import raises
from torch import Tensor

from fedgraft.aggregate import mean as m
from fedgraft.core.errors import FedgraftError


def stack(clients: int, size: int, seed: int = 0) -> Tensor:
    return torch.randn(clients, size, generator=torch.Generator().manual_seed(seed))


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


def test_golden_two_clients() -> None:
    # n = (1, 3): weights 1/4 and 3/4. Coordinate 0: 4/4 - 4*3/4 = 1 - 3 = -2. Coordinate 1: 8/4 + 0 = 2.
    updates = [torch.tensor([4.0, 8.0]), torch.tensor([-4.0, 0.0])]
    assert m.weighted_mean(updates, torch.tensor([1, 3])).tolist() == [-2.0, 2.0]


def test_weights_are_normalised_over_the_clients_given() -> None:
    updates, counts = stack(3, 50), torch.tensor([10.0, 20.0, 30.0])
    assert same_bits(
        m.weighted_mean(updates, counts), m.weighted_mean(updates, counts / 64)
    )  # weights sum to one over those given
    wrong = sum(
        c * n / 1000 for c, n in zip(updates, counts, strict=True)
    )  # normalised over clients that were not asked
    assert not torch.allclose(m.weighted_mean(updates, counts), torch.as_tensor(wrong), rtol=1e-2)


def test_against_numpy_and_across_chunks() -> None:
    updates, weights = stack(7, m.CHUNK + 3), torch.rand(7, generator=torch.Generator().manual_seed(1))
    expected = np.average(updates.numpy().astype(np.float64), axis=0, weights=weights.numpy())
    np.testing.assert_allclose(m.weighted_mean(updates, weights), expected, rtol=1e-6, atol=1e-8)


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=6),
    st.lists(st.integers(1, 999), min_size=1),
)
def test_equal_changes_average_to_themselves(values: list[float], counts: list[int]) -> None:
    update = torch.tensor(values)
    result = m.weighted_mean([update] * len(counts), torch.tensor(counts))
    assert torch.equal(result, update)


def test_averaging_weights_would_not_keep_untouched_coordinates() -> None:
    """The float32 mean of ten equal models moves coordinates; the update form does not move one."""
    model = stack(1, 4000)[0]
    drifted = sum((model * 0.1 for _ in range(10)), torch.zeros(4000))
    assert (drifted != model).float().mean() > 0.3
    assert same_bits(model + m.weighted_mean([torch.zeros(4000)] * 10, torch.ones(10)), model)


def test_one_client_is_returned_bit_for_bit() -> None:
    update = torch.tensor([-0.0, 1e-45, 3.4e38, -1.1])
    assert same_bits(m.weighted_mean([update], torch.tensor([7.0])), update)


def test_threads_and_streaming_do_not_change_bits() -> None:
    updates, weights = stack(5, 100_000), torch.arange(1.0, 6)
    before, threads = m.weighted_mean(updates, weights), torch.get_num_threads()
    try:
        torch.set_num_threads(3 - min(threads, 2))
        assert same_bits(m.weighted_mean((c for c in updates), weights), before)
    finally:
        torch.set_num_threads(threads)


def test_inputs_are_not_changed() -> None:
    updates = [torch.ones(4, dtype=torch.float64), torch.ones(4, dtype=torch.float64)]
    m.sum_unweighted(updates)
    m.weighted_mean(updates, torch.ones(2))
    assert updates[0].tolist() == [1.0] * 4


def test_a_weight_of_zero_keeps_nan_out() -> None:
    updates = [torch.tensor([1.0]), torch.tensor([torch.nan])]
    assert m.weighted_mean(updates, torch.tensor([1.0, 0.0])).item() == 1.0


@pytest.mark.parametrize("weights", [[0.0, 0.0], [1.0, -1.0], [1.0, torch.nan], [torch.inf, 1.0], []])
def test_bad_weights_are_refused(weights: list[float]) -> None:
    with pytest.raises(FedgraftError):
        m.weighted_mean(stack(len(weights), 3), torch.tensor(weights))


def test_wrong_lengths_are_refused() -> None:
    with raises("E-AGGREGATE-SHAPES"):
        m.weighted_mean([torch.ones(2), torch.ones(3)], torch.ones(2))
    with pytest.raises(ValueError, match="zip"):
        m.weighted_mean([torch.ones(2)], torch.ones(2))
    with raises("E-AGGREGATE-NO-UPDATES"):
        m.sum_unweighted([])


def test_normalised_is_idempotent() -> None:
    """Dividing once more would move bits: some of these sums are one only up to rounding."""
    sums = set()
    for seed in range(20):
        once = m.normalised(torch.rand(23, generator=torch.Generator().manual_seed(seed)))
        sums.add(float(once.sum()))
        assert torch.equal(m.normalised(once), once)
    assert len(sums) > 1


def test_sum_unweighted() -> None:
    updates = stack(4, 70_000)
    torch.testing.assert_close(m.sum_unweighted(updates), updates.sum(0), rtol=1e-5, atol=1e-5)


def test_count_normalised_against_a_loop() -> None:
    updates, weights = stack(4, 30), torch.tensor([1.0, 2.0, 3.0, 4.0])
    masks = torch.rand(4, 30, generator=torch.Generator().manual_seed(2)) < 0.4
    masks[:, 0] = False  # nobody moves coordinate 0
    result = m.count_normalised(updates, masks, weights)
    for j in range(30):
        chosen = [k for k in range(4) if masks[k, j]]
        total = sum(float(weights[k]) for k in chosen)
        expected = sum(float(weights[k] * updates[k, j]) for k in chosen) / total if chosen else 0.0
        assert float(result[j]) == pytest.approx(expected, rel=1e-5, abs=1e-7)
    zero_filled = m.weighted_mean(torch.where(masks, updates, 0), weights)
    assert (zero_filled.abs() <= result.abs() + 1e-7).all()  # zero-filling only shrinks
    assert not torch.allclose(zero_filled, result)


def test_count_normalised_with_full_masks_is_the_mean_and_ignores_what_is_outside() -> None:
    updates, weights = stack(3, 20), torch.tensor([1.0, 5.0, 2.0])
    full = torch.ones(3, 20, dtype=torch.bool)
    torch.testing.assert_close(m.count_normalised(updates, full, weights), m.weighted_mean(updates, weights))
    masks = full.clone()
    masks[1] = False
    updates[1] = torch.nan
    assert m.count_normalised(updates, masks, weights).isfinite().all()


def test_drift_report() -> None:
    # mean of (3, 4) and (3, -4) is (3, 0): norms 5, drifts 4, cosines 15 / (5 * 3) ... = 9 / 15 = 0.6.
    updates = torch.tensor([[3.0, 4.0], [3.0, -4.0], [0.0, 0.0]])
    report = m.drift_report(updates, torch.tensor([3.0, 0.0]))
    assert report.norms.tolist() == [5.0, 5.0, 0.0]
    assert report.drifts.tolist() == [4.0, 4.0, 3.0]
    assert report.cosines.tolist() == pytest.approx([0.6, 0.6, 0.0])


@pytest.mark.parametrize("length", [5, m.CHUNK + 3])
def test_drift_of_equal_changes_is_exactly_zero_and_else_the_distance(length: int) -> None:
    """Also beyond one chunk; the identity for the distance must not leave rounding where there is nothing."""
    draw = torch.Generator().manual_seed(0)
    update = torch.randn(length, generator=draw)
    assert m.drift_report([update, update.clone()], update).drifts.tolist() == [0.0, 0.0]
    other = update + 1e-3 * torch.randn(length, generator=draw)
    found = m.drift_report([other], update).drifts
    assert float(found[0]) == pytest.approx(float((other.double() - update.double()).norm()), rel=1e-6)
