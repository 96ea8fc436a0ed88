"""The small CNN: its shape, its entries, its weights from the seed."""

from __future__ import annotations

import pytest
import torch
from tests.support.errors import raises
from torch import nn

from fedgraft.models.backbones import load_network


def by_hand(network: nn.Module, images: torch.Tensor) -> torch.Tensor:
    """The usual layers with the same weights, channels first."""
    p = {name: value.detach() for name, value in network.named_parameters()}
    for block in (0, 1):
        weight, bias = (p[f"backbone.blocks.{block}.0.{part}"] for part in ("weight", "bias"))
        images = nn.functional.max_pool2d(nn.functional.conv2d(images, weight, bias, padding=1).relu(), 2)
    return images.flatten(1) @ p["head.weight"].T + p["head.bias"]


@pytest.mark.parametrize("size", [None, 16])
def test_it_is_two_convolutions_and_a_head(size: int | None) -> None:
    network = load_network("cnn:width=4", 5, image_size=size)
    side = size or 32
    images = torch.randn(3, 3, side, side, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(network(images), by_hand(network, images), atol=1e-5, rtol=1e-5)
    assert network.depth == 2 and network.width == 8 * (side // 4) ** 2
    assert not torch.allclose(network(images), by_hand(network, images.flip(3)), atol=1e-3)  # it sees a flip


def test_entries_compose_and_blocks_are_named() -> None:
    network = load_network("cnn:width=4", 5)
    images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    for entry in (1, 2):
        torch.testing.assert_close(network(network.features(images, 0, entry), entry), network(images))
    assert network.block_of("backbone.blocks.1.0.weight") == 1 and network.block_of("head.bias") == 3
    assert set(network.activations(images, network.default_probe_layers())) == {"block0", "block1"}


def test_weights_come_from_the_seed_alone() -> None:
    before = torch.get_rng_state()
    one, two, other = (load_network("cnn:width=4", 5, seed=s) for s in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), before)
    pairs = list(zip(one.parameters(), two.parameters(), other.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b, _ in pairs) and not any(torch.equal(a, c) for a, _, c in pairs)


def test_sizes_that_do_not_fit_are_refused() -> None:
    with raises("E-MODELS-CNN-SIZE", size=3):
        load_network("cnn", 5, image_size=3)
    with raises("E-MODELS-PIXELS", pixels=(16, 16)):
        load_network("cnn", 5)(torch.zeros(1, 3, 16, 16))
    with raises("E-MODELS-OPTION", option="depth"):
        load_network("cnn:depth=3", 5)
