"""Secure aggregation and differential privacy: in either order they are the same, and updates are clipped once."""

from __future__ import annotations

from fedgraft import algorithms as zoo
from fedgraft.aggregate.slots import uniform
from fedgraft.privacy.dp import Mechanism
from fedgraft.privacy.protection import DifferentialPrivacy, private, secure


def test_the_order_does_not_matter_and_a_new_bound_replaces_the_old() -> None:
    algorithm = zoo.fedavg(weighting=uniform())
    loose = DifferentialPrivacy(Mechanism(1.0, 1.0, 5), clip=1.0)
    tight = DifferentialPrivacy(Mechanism(2.0, 1.0, 5), clip=0.1)
    one_way = secure(private(algorithm, loose))
    other_way = private(secure(algorithm), loose)
    for protected in (one_way, other_way):
        assert protected.privacy.links == protected.update[-1:] and len(protected.update) == 1
        again = private(protected, tight)
        assert len(again.update) == 1 and again.update == again.privacy.links
