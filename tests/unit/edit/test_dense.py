"""Which tensors each dense kind opens, by name."""

from __future__ import annotations

import pytest
from tests.support.errors import raises
from tests.support.toy import ToyNetwork

from fedgraft.core.capabilities import Capability
from fedgraft.edit.dense import Dense, body, everything, head, last_blocks

STEM, ONE, TWO, NORM, HEAD = "backbone.stem.", "backbone.layers.0.", "backbone.layers.1.", "backbone.norm.", "head."


@pytest.mark.parametrize(
    ("kind", "wanted"),
    [
        (everything(), (STEM, ONE, TWO, NORM, HEAD)),
        (everything(freeze_blocks=1), (TWO, NORM, HEAD)),
        (head(), (HEAD,)),
        (body(), (STEM, ONE, TWO, NORM)),
        (body(freeze_blocks=1), (TWO, NORM)),
        (last_blocks(1), (TWO, NORM, HEAD)),
        (last_blocks(1, head=False), (TWO, NORM)),
        (last_blocks(2), (ONE, TWO, NORM, HEAD)),
    ],
)
def test_each_kind_opens_exactly_its_tensors(kind: Dense, wanted: tuple[str, ...]) -> None:
    network = ToyNetwork()
    opened = {part.name for part in kind.open(network).space.parts}
    assert opened == {name for name, _ in network.named_parameters() if name.startswith(wanted)}
    assert (Capability.TRAINED_HEAD in kind.provides) == (HEAD in wanted)
    assert (Capability.TRAINED_BODY in kind.provides) == (wanted != (HEAD,))


def test_more_blocks_than_there_are_are_refused() -> None:
    for kind in (last_blocks(3), everything(freeze_blocks=3)):
        with raises("E-EDIT-BLOCKS"):
            kind.open(ToyNetwork())
