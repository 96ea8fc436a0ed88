"""Mixtures: rows sum to one, constant similarity is the plain mean bit for bit, files and partial rounds."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.errors import raises
from torch import Tensor

from fedgraft.aggregate import mixing as mixtures
from fedgraft.aggregate.mean import normalised, weighted_mean


def stack(clients: int, size: int, seed: int = 0) -> Tensor:
    return torch.randn(clients, size, generator=torch.Generator().manual_seed(seed))


def similar(clients: int, seed: int = 0) -> Tensor:
    s = torch.rand(clients, clients, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return ((s + s.T) / 2).fill_diagonal_(1)


def test_golden_two_clients() -> None:
    # S = [[1, 1/2], [1/2, 1]]: W = [[2/3, 1/3], [1/3, 2/3]]. Offsets 3 and 6 around the anchor 10:
    # client 0: 10 + 2 + 2 = 14, client 1: 10 + 1 + 4 = 15.
    mixing = mixtures.mixing_matrix(torch.tensor([[1.0, 0.5], [0.5, 1.0]]))
    result = mixtures.mix(torch.tensor([10.0]), torch.tensor([[3.0], [6.0]]), mixing)
    torch.testing.assert_close(result, torch.tensor([[14.0], [15.0]]))
    # With 1 and 4 examples: row 0 is (1, 2) / 3, row 1 is (0.5, 4) / 4.5.
    mixing = mixtures.mixing_matrix(torch.tensor([[1.0, 0.5], [0.5, 1.0]]), torch.tensor([1, 4]))
    torch.testing.assert_close(mixing, torch.tensor([[1, 2], [1 / 3, 8 / 3]], dtype=torch.float64) / 3)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 12), st.integers(0, 9999), st.booleans())
def test_rows_sum_to_one(clients: int, seed: int, counted: bool) -> None:
    examples = torch.randint(1, 500, (clients,), generator=torch.Generator().manual_seed(seed)) if counted else None
    mixing = mixtures.mixing_matrix(similar(clients, seed), examples)
    torch.testing.assert_close(mixing.sum(1), torch.ones(clients, dtype=torch.float64), rtol=0, atol=1e-12)


def test_min_max_rows_would_not_sum_to_one() -> None:
    """The planted bug: rows scaled by min and max (as in one public code) are no mixture."""
    s = similar(5)
    wrong = (s - s.min(1, keepdim=True).values) / (s.max(1, keepdim=True).values - s.min(1, keepdim=True).values)
    assert (wrong.sum(1) - 1).abs().min() > 0.1


@pytest.mark.parametrize("value", [1.0, 0.3, 1 / 7])
@pytest.mark.parametrize("counted", [False, True])
def test_constant_similarity_is_the_weighted_mean_bit_for_bit(value: float, counted: bool) -> None:
    """Whatever the constant, every row is anchor + weighted_mean(offsets)."""
    anchor, offsets = stack(1, 70_000, 5)[0], stack(6, 70_000)
    examples = torch.tensor([3, 50, 7, 11, 900, 1]) if counted else None
    mixing = mixtures.mixing_matrix(torch.full((6, 6), value), examples)
    result = mixtures.mix(anchor, offsets, mixing, chunk=1000)
    expected = anchor + weighted_mean(offsets, torch.ones(6) if examples is None else examples)
    assert all(torch.equal(row, expected) for row in result)


def test_constant_rows_are_exactly_the_weights_of_fedavg() -> None:
    """Without dividing by the largest entry first, some constants leave rows that differ in the last bit."""
    wrong = 0
    for tenth in range(1, 30):
        counts = torch.arange(1, 8) * tenth + 3
        value = torch.tensor(tenth / 31, dtype=torch.float64)
        expected = normalised(counts)
        assert all(torch.equal(row, expected) for row in mixtures.mixing_matrix(value.expand(7, 7), counts))
        wrong += not torch.equal(normalised(value * counts), expected)
    assert wrong > 0


def test_groups_are_means_within_groups_bit_for_bit() -> None:
    anchor, offsets = stack(1, 500, 5)[0], stack(6, 500)
    group = torch.block_diag(torch.ones(2, 2), torch.ones(4, 4))
    result = mixtures.mix(anchor, offsets, mixtures.mixing_matrix(group))
    for rows in (slice(0, 2), slice(2, 6)):
        expected = anchor + weighted_mean(offsets[rows], torch.ones(rows.stop - rows.start))
        assert all(torch.equal(row, expected) for row in result[rows])


def test_many_rows_of_which_some_repeat_take_the_product_and_stay_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Summing each of hundreds of rows like the mean took minutes for a thousand clients."""
    clients = 2 * mixtures.GROUPS + 2
    anchor, offsets, mixing = stack(1, 50, 5)[0], stack(clients, 50), mixtures.mixing_matrix(similar(clients))
    mixing[1] = mixing[0]
    monkeypatch.setattr(mixtures, "accumulate", lambda rows, factors: pytest.fail("summed row by row"))
    result = mixtures.mix(anchor, offsets, mixing)
    assert torch.equal(result[0], result[1]) and not torch.equal(result[1], result[2])
    expected = anchor.double() + mixing @ offsets.double()
    torch.testing.assert_close(result.double(), expected, rtol=1e-6, atol=1e-6)


def test_identity_is_local_training() -> None:
    anchor, offsets = stack(1, 300, 5)[0], stack(4, 300)
    assert torch.equal(mixtures.mix(anchor, offsets, mixtures.mixing_matrix(torch.eye(4))), anchor + offsets)


def test_identical_clients_get_uniform_rows_and_stay_identical() -> None:
    offsets = stack(1, 300)[0].repeat(4, 1)
    result = mixtures.mix(torch.zeros(300), offsets, mixtures.mixing_matrix(torch.ones(4, 4)))
    assert torch.equal(result, offsets)


@pytest.mark.parametrize("kind", ["stack", "list", "array"])
def test_against_a_loop_and_every_kind_of_input(kind: str) -> None:
    anchor, offsets, mixing = stack(1, 130, 5)[0], stack(5, 130), mixtures.mixing_matrix(similar(5))
    kinds: dict[str, mixing.Rows] = {"stack": offsets, "list": list(offsets), "array": offsets.numpy()}
    given_as = kinds[kind]
    result = mixtures.mix(anchor, given_as, mixing, chunk=32)
    for i in range(5):
        expected = anchor.double() + sum(mixing[i, j] * offsets[j].double() for j in range(5))
        torch.testing.assert_close(result[i].double(), expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(result, mixtures.mix(anchor, given_as, mixing))


def test_permuting_clients_permutes_the_result() -> None:
    anchor, offsets, s = stack(1, 50, 5)[0], stack(6, 50), similar(6)
    order = torch.randperm(6, generator=torch.Generator().manual_seed(1))
    a = mixtures.mix(anchor, offsets, mixtures.mixing_matrix(s))[order]
    b = mixtures.mix(anchor, offsets[order], mixtures.mixing_matrix(s[order][:, order]))
    torch.testing.assert_close(a, b)


def test_pieces_carry_the_mean_of_the_offsets_in_the_bits_of_the_plain_mean() -> None:
    anchor, offsets, mixing = stack(1, 400, 5)[0], stack(3, 400), mixtures.mixing_matrix(similar(3))
    weights, mean = torch.tensor([1.0, 5.0, 2.0]), torch.empty(400)
    pieces = [values for _, values in mixtures.blended(anchor, offsets, mixing, (weights, mean), chunk=64)]
    assert torch.equal(torch.cat(pieces, 1), mixtures.mix(anchor, offsets, mixing, chunk=64))
    assert torch.equal(mean, anchor + weighted_mean(offsets, weights))


def test_refusals() -> None:
    bad = torch.eye(3)
    for value in (-0.1, torch.nan):
        bad[0, 1] = value
        with raises("E-AGGREGATE-SIMILARITY-MATRIX"):
            mixtures.mixing_matrix(bad)
    with raises("E-AGGREGATE-SIMILARITY-MATRIX"):
        mixtures.mixing_matrix(torch.ones(2, 3))
    with raises("E-AGGREGATE-SIMILARITY-ROW"):
        mixtures.mixing_matrix(torch.zeros(2, 2))
