"""Looking through a network without training it: the one loop for features, hidden layers and caches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor

from fedgraft.local.transfer import onto
from fedgraft.protocols import Examples, Network

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
    usual = dict(zip(("early", "middle", "late"), network.default_probe_layers(), strict=False))
    names = [usual.get(layer, layer) for layer in layers]
    rows = torch.arange(len(examples)).split(size)
    parts = [look(network, examples.batch(r), lambda x: network.activations(x, names, examples.entry)) for r in rows]
    return [torch.cat([part[name].cpu() for part in parts]) for name in names]
