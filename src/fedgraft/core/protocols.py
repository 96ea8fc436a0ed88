"""The protocols of a network and of data that the learning code (client, server, edit, local) uses.

It is written against these two, so it does not depend on where images come from or which library built the network.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn


@runtime_checkable
class Network(Protocol):
    """A backbone (`backbone.*`) with a linear head (`head.weight`, `head.bias`).

    Positions along the network are counted in blocks: entry 0 takes pixels, entry b takes the tokens that enter
    block b, and entry `depth` takes the pooled features, the input of the head. Work on the layers behind an entry
    can therefore start there, from cached activations.
    """

    depth: int
    """Number of blocks; entry `depth` is the head's input."""
    width: int
    """Length of the pooled feature vector."""
    classes: int
    label_sets: bool
    """Whether its outputs are findings, of which an image has any number, not classes that exclude each other."""
    head: nn.Linear

    def __call__(self, inputs: Tensor, entry: int = 0) -> Tensor:
        """Return logits (B, classes) from inputs at `entry`."""
        ...

    def features(self, inputs: Tensor, entry: int = 0, until: int | None = None) -> Tensor:
        """Return activations at entry `until` (default `depth`: pooled features, (B, width)) from inputs at `entry`."""
        ...

    def block_of(self, name: str) -> int:
        """Return the block of a parameter: -1 before block 0, `depth` for the final norm, `depth + 1` for the head."""
        ...

    def default_probe_layers(self) -> tuple[str, ...]:
        """Return the names of an early, a middle and a late layer, for comparing networks."""
        ...

    def activations(self, inputs: Tensor, layers: Iterable[str], entry: int = 0) -> dict[str, Tensor]:
        """Return the outputs of the named hidden layers, one vector per example."""
        ...

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]: ...
    def named_buffers(self) -> Iterator[tuple[str, Tensor]]: ...
    def modules(self) -> Iterator[nn.Module]: ...
    def named_modules(self) -> Iterator[tuple[str, nn.Module]]: ...
    def get_submodule(self, target: str) -> nn.Module: ...
    def train(self, mode: bool = True) -> nn.Module: ...
    def eval(self) -> nn.Module: ...
    def parameters(self) -> Iterator[nn.Parameter]: ...


class Examples(Protocol):
    """Labelled inputs addressed by row; rows are positions in their data store."""

    labels: Tensor
    """Classes, int64 (N,), or label sets, int64 (N, C): see `core.label_sets`."""
    entry: int
    """The entry at which these inputs enter the network: 0 for pixels, `depth` for cached features."""

    def __len__(self) -> int: ...

    def batch(self, rows: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Return the normalised float32 inputs of these rows; a generator selects the training transform."""
        ...


@runtime_checkable
class Prefetching(Protocol):
    """Examples that can prepare rows ahead of their use, for example decode images in threads."""

    def prefetch(self, rows: Tensor) -> None:
        """Begin to prepare these rows; return at once."""
        ...


def with_prefetch(examples: Examples, batches: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield batches of rows one by one; while one is used, examples that can do so prepare the next."""
    if not isinstance(examples, Prefetching):
        yield from batches
        return
    waiting: Tensor | None = None
    for batch in batches:
        examples.prefetch(batch)
        if waiting is not None:
            yield waiting
        waiting = batch
    if waiting is not None:
        yield waiting
