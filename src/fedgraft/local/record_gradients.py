"""The gradient of every image of a batch by itself, by `torch.func`: what record-level privacy clips."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.func import functional_call, grad_and_value, vmap

from fedgraft.core.protocols import Network

_VALUES_AT_ONCE = 1 << 26  # gradients of several images are held at once: 256 MB


class RecordSpace(Protocol):
    """Trained coordinates whose gradients can be had for each image; implemented by `core.space.Bound`."""

    @property
    def trained(self) -> int: ...
    def trained_tensors(self) -> dict[str, Tensor]: ...
    def coordinates(self, tensors: Mapping[str, Tensor]) -> Tensor: ...


def record_gradients(
    network: Network,
    space: RecordSpace,
    value: Callable[[Any, Tensor, Tensor, int], Tensor],
    inputs: Tensor,
    labels: Tensor,
    entry: int,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield gradients (b, trained) and losses (b,) of the images of a batch, as many at once as memory allows.

    Args:
        space: the trained coordinates.
        value: a loss of a batch, which for one image is that image's.
        inputs, labels: the batch; `entry` is where the inputs enter the network.
    """
    weights = {name: tensor.detach() for name, tensor in space.trained_tensors().items()}

    def loss_of(present: dict[str, Tensor], image: Tensor, label: Tensor) -> Tensor:
        """Return the loss of one image under these weights."""

        def under_weights(batch: Tensor, start: int = 0) -> Tensor:
            logits: Tensor = functional_call(network, present, (batch, start))  # type: ignore[arg-type]
            return logits

        return value(under_weights, image.unsqueeze(0), label.unsqueeze(0), entry)

    by_image = vmap(grad_and_value(loss_of), in_dims=(None, 0, 0))
    at_once = max(1, _VALUES_AT_ONCE // max(1, sum(tensor.numel() for tensor in weights.values())))
    for images, own_labels in zip(inputs.split(at_once), labels.split(at_once), strict=True):
        gradients, losses = by_image(weights, images, own_labels)
        with torch.no_grad():
            yield space.coordinates(gradients), losses.detach()
