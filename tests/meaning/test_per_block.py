"""A mask chosen `per_block` shares the budget out by block, and within a block by score alone."""

from __future__ import annotations

import numpy as np
from tests.support.tiny import Open, tiny


def test_a_block_trains_its_smallest_weights_whatever_tensor_they_are_in() -> None:
    opened = Open(
        tiny(
            "trainable.kind=sparse",
            "trainable.sparse.strategy=lowest_magnitude",
            "trainable.sparse.rounds=1",
            "trainable.sparse.threshold=per_block",
        )
    )
    network = opened.network
    body = (name for name in opened.mask.tensors if network.block_of(name) <= network.depth)  # the head is dense
    tensors = {name: opened.mask.tensors[name] for name in body}
    weights = dict(network.named_parameters())
    blocks: dict[int, list[str]] = {}
    for name in tensors:
        blocks.setdefault(network.block_of(name), []).append(name)
    several = [names for names in blocks.values() if len(names) > 1]
    assert several
    whole = sum(mask.numel() for mask in tensors.values())
    chosen = sum(int(mask.sum()) for mask in tensors.values())
    for names in blocks.values():
        values = np.concatenate([weights[name].detach().abs().numpy().ravel() for name in names])
        mask = np.concatenate([tensors[name].numpy().ravel() for name in names])
        assert abs(int(mask.sum()) - chosen * len(values) / whole) <= 1
        if mask.any() and not mask.all():
            assert values[mask].max() <= values[~mask].min()
