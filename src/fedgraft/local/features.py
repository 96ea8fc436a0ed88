"""Looking through a network without training it: the one loop for features, hidden layers and caches."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor

from fedgraft.core.protocols import Examples, Network
from fedgraft.local.transfer import onto

T = TypeVar("T")


@contextmanager
def evaluating(network: Network) -> Iterator[None]:
    """Evaluation mode without gradients; every module gets back the mode it had."""
    training = [module for module in network.modules() if module.training]
    network.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True


def look(network: Network, inputs: Tensor, see: Callable[[Tensor], T]) -> T:
    """What `see` makes of one batch of inputs, with the network evaluating and the batch where the network is."""
    with evaluating(network):
        return see(onto(inputs, next(network.parameters()).device))


def features(
    network: Network, examples: Examples, rows: Tensor, until: int | None = None, size: int = 512
) -> Iterator[tuple[Tensor, Tensor]]:
    """Rows and their activations at entry `until` (default: pooled features, (B, width)) on the CPU, by batch."""
    for picked in rows.split(size):
        found = look(network, examples.batch(picked), lambda x: network.features(x, examples.entry, until))
        yield picked, found.float().cpu()


def hidden(network: Network, layers: tuple[str, ...], examples: Examples, size: int = 256) -> list[Tensor]:
    """Outputs of these layers for all examples, tokens averaged, (n, d) each; `early`, `middle`, `late` by default."""
    names = layer_names(network, layers)
    rows = torch.arange(len(examples)).split(size)
    parts = [look(network, examples.batch(r), lambda x: network.activations(x, names, examples.entry)) for r in rows]
    return [torch.cat([part[name].cpu() for part in parts]) for name in names]


def layer_names(network: Network, layers: Iterable[str]) -> list[str]:
    """The network's own names of these layers."""
    usual = dict(zip(("early", "middle", "late"), network.default_probe_layers(), strict=False))
    return [usual.get(layer, layer) for layer in layers]


def block_of(layer: str) -> int:
    """The block that a layer (`block3.mlp`, ...) is in; 0 for what is before all of them."""
    return int(found[1]) if (found := re.match(r"block(\d+)", layer)) else 0


def first_seen(network: Network, layers: Sequence[str], block: int) -> int:
    """Which of these layers (`block3.mlp`, ...) is the first to show a change in this block; the last where none is."""
    at = [block_of(name) for name in layer_names(network, layers)]
    later = [i for i, position in enumerate(at) if position >= block]
    return min(later, key=lambda i: at[i]) if later else max(range(len(at)), key=lambda i: at[i])
