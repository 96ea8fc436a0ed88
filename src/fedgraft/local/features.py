"""Forward passes without training: the one loop for features, hidden layers and caches."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor

from fedgraft.core.device import Device, evaluation_precision, fetch, inputs_on
from fedgraft.core.protocols import Examples, Network, with_prefetch
from fedgraft.local.forward_memory import images_at_once

T = TypeVar("T")


@contextmanager
def evaluating(network: Network) -> Iterator[None]:
    """Put the network in evaluation mode without gradients; every module gets back its mode at the end."""
    training = [module for module in network.modules() if module.training]
    network.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True


def evaluate_batch(network: Network, inputs: Tensor, see: Callable[[Tensor], T]) -> T:
    """Return `see(inputs)` for one batch, in evaluation mode, without gradients, and on the network's device."""
    with evaluating(network), evaluation_precision(network):
        return see(Device.of(network).put(inputs))


def feature_batches(
    network: Network, examples: Examples, rows: Tensor, until: int | None = None, size: int = 512
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield batches of `size` rows and their CPU activations at entry `until` (default: pooled features (B, width))."""

    def see(inputs: Tensor) -> Tensor:
        return network.features(inputs, examples.entry, until)

    for batch in with_prefetch(examples, rows.split(images_at_once(network, examples.entry, size))):
        activations = evaluate_batch(network, inputs_on(Device.of(network), examples, batch), see)
        yield batch, fetch(activations.float())


def hidden(network: Network, layers: tuple[str, ...], examples: Examples, size: int = 256) -> list[Tensor]:
    """Return the outputs of these layers for all examples, averaged over tokens, one (n, d) tensor per layer.

    `layers` are the network's own names or `early`, `middle`, `late`; `size` is the batch size.
    """
    names = layer_names(network, layers)

    def see(inputs: Tensor) -> Mapping[str, Tensor]:
        return network.activations(inputs, names, examples.entry)

    batches: dict[str, list[Tensor]] = {name: [] for name in names}
    for rows in torch.arange(len(examples)).split(images_at_once(network, examples.entry, size)):
        activations = evaluate_batch(network, inputs_on(Device.of(network), examples, rows), see)
        for name in batches:
            batches[name].append(fetch(activations[name].float()))
    return [torch.cat(batches[name]) for name in names]


def layer_names(network: Network, layers: Iterable[str]) -> list[str]:
    """Return the network's own names of these layers, which may be called `early`, `middle` and `late`."""
    usual = dict(zip(("early", "middle", "late"), network.default_probe_layers(), strict=False))
    return [usual.get(layer, layer) for layer in layers]


def block_in_name(layer: str) -> int:
    """Return the number of the block that a layer's name begins with (`block3.mlp`: 3); 0 if it names none."""
    match = re.match(r"block(\d+)", layer)
    if match is None:
        return 0
    return int(match[1])


def first_seen(network: Network, layers: Sequence[str], block: int) -> int:
    """Return the index of the first of these layers whose output a change in this block affects; else of the last."""
    blocks = [block_in_name(name) for name in layer_names(network, layers)]
    affected = [i for i, position in enumerate(blocks) if position >= block]
    if affected:
        return min(affected, key=lambda i: blocks[i])
    return max(range(len(blocks)), key=lambda i: blocks[i])
