"""The digest of activations at an entry: it follows every tensor before the entry, and none behind it."""

from __future__ import annotations

import pytest
import torch
from tests.support.toy import ToyNetwork

from fedgraft.core.network_digest import digest


@pytest.mark.parametrize("until", [0, 1, 2])
def test_it_changes_with_exactly_what_the_activations_depend_on(until: int) -> None:
    inputs = torch.randn(4, 5, generator=torch.Generator().manual_seed(0))
    before = digest(ToyNetwork(), until)
    features = ToyNetwork().features(inputs, 0, until)
    for name in dict(ToyNetwork().named_parameters()):
        changed = ToyNetwork()
        with torch.no_grad():
            changed.get_parameter(name).add_(torch.randn_like(changed.get_parameter(name)))
        depends = until > 0 and not torch.equal(changed.features(inputs, 0, until), features)
        assert (digest(changed, until) != before) == depends, name
