"""SVCCA of two whole representations, put together from the package's parts."""

from __future__ import annotations

from torch import Tensor

from fedgraft.aggregate.similarity import Score, svcca_basis, svcca_of_bases
from fedgraft.aggregate.sketch import SketchedBasis


def svcca(x: Tensor, y: Tensor, keep: int | float = 50, top: int | None = 20) -> Score:
    """SVCCA of two representations (n, d) and (n, e) of the same n examples."""
    return svcca_of_bases(svcca_basis(x, keep), svcca_basis(y, keep), top)


def sketched_svcca(x: SketchedBasis, y: SketchedBasis, top: int | None = 20) -> tuple[Score, float]:
    """SVCCA of two sketched bases over the same rows, and how far it can be from that of the true ones."""
    return svcca_of_bases(x.basis, y.basis, top), min(1.0, x.sine + y.sine)
