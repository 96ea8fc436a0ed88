"""Sketched SVCCA against the exact one: the stated bound holds on every drawn case and is small where there is one."""

from __future__ import annotations

import pytest
import torch
from tests.support.svcca import sketched_svcca, svcca

from fedgraft.aggregate.similarity import svcca_basis, svcca_of_bases
from fedgraft.aggregate.sketch import SketchedBasis, basis_of, sketched_basis


def drawn(n: int, d: int, rank: int, noise: float, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Two views of the same few directions, with noise of their own."""
    g = torch.Generator().manual_seed(seed)
    z = torch.randn(n, rank, generator=g)
    views = [z @ torch.randn(rank, d, generator=g) + noise * torch.randn(n, d, generator=g) for _ in range(2)]
    return views[0], views[1]


@pytest.mark.parametrize("noise", [0.001, 0.05, 0.3, 1.0])
def test_the_bound_holds(noise: float) -> None:
    for seed in range(12):
        x, y = drawn(120, 60 + 10 * (seed % 9), 8, noise, seed)
        g = torch.Generator().manual_seed(100 + seed)
        bases = [sketched_basis(one, 8, g, extra=6, power=1) for one in (x, y)]
        found, bound = sketched_svcca(bases[0], bases[1], 8)
        assert abs(found.value - svcca(x, y, 8, 8).value) <= bound + 1e-9
        for one, view in zip(bases, (x, y), strict=True):
            exact = svcca_basis(view, 8)
            sine = torch.linalg.matrix_norm(exact - one.basis @ (one.basis.T @ exact), 2)
            assert float(sine) <= one.sine + 1e-9


def test_it_is_close_where_directions_stand_out_and_says_so() -> None:
    x, y = drawn(300, 200, 10, 0.01, 0)
    g = torch.Generator().manual_seed(1)
    found, bound = sketched_svcca(sketched_basis(x, 10, g), sketched_basis(y, 10, g), 10)
    assert bound < 1e-3 and found.value == pytest.approx(svcca(x, y, 10, 10).value, abs=1e-4)


def test_without_a_gap_nothing_is_promised() -> None:
    flat = torch.randn(100, 80, generator=torch.Generator().manual_seed(0))
    assert sketched_basis(flat, 10, torch.Generator().manual_seed(0)).sine == 1.0


def test_a_wrong_basis_breaks_the_bound() -> None:
    """The planted bug: a basis of other directions that claims the same small angle."""
    x, y = drawn(120, 60, 8, 0.01, 3)
    g = torch.Generator().manual_seed(0)
    good = sketched_basis(x, 8, g)
    wrong = SketchedBasis(torch.linalg.qr(torch.randn(120, 8, generator=g, dtype=torch.float64)).Q, good.sine)
    found, bound = sketched_svcca(wrong, sketched_basis(y, 8, g), 8)
    assert abs(found.value - svcca(x, y, 8, 8).value) > bound


def test_bases_without_a_gap_are_near_with_more_columns_and_exact_without_a_sketch() -> None:
    """A spectrum that falls slowly, as a real layer's: nothing is promised, and the score is near all the same."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(400, 150, generator=g) * 0.97 ** torch.arange(150)
    y = x + 0.05 * torch.randn(400, 150, generator=g)
    exact = svcca(x, y, 20, 20).value
    assert torch.equal(basis_of(x, 20), svcca_basis(x, 20))
    assert torch.equal(basis_of(x, 20, 130), svcca_basis(x, 20))  # as wide as the layer: no sketch
    found = svcca_of_bases(basis_of(x, 20, 40), basis_of(y, 20, 40), 20).value
    assert found == pytest.approx(exact, abs=2e-3)
    assert basis_of(torch.full((100, 90), torch.nan), 10, 5).shape == (100, 0)
