"""What a client minimises. A loss looks at the client once per round and gives the function that its steps use.

`begin(setting)` sees the client's labels, the network as the round found it and what the client remembers; it returns
`value(network, inputs, labels, entry)`, the scalar to step down. `finish` says what the client remembers for next time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import Tensor
from torch.nn.functional import cross_entropy as softmax_loss

from fedgraft.protocols import Network
from fedgraft.registry import LOSSES

Value = Callable[[Network, Tensor, Tensor, int], Tensor]


@dataclass(frozen=True)
class LossSetting:
    """What a loss may look at before the first step of a round."""

    network: Network
    labels: Tensor
    """The labels of this client's training rows, int64 (n,)."""
    classes: int
    memory: Mapping[str, Tensor] = field(default_factory=dict)


def _nothing(network: Network) -> dict[str, Tensor]:
    return {}


@dataclass(frozen=True)
class Loss:
    """`begin(setting) -> value`; `finish(network)` gives what the client keeps under the loss's own names."""

    name: str
    begin: Callable[[LossSetting], Value]
    finish: Callable[[Network], dict[str, Tensor]] = _nothing
    smoothing: float | None = None
    """Cross-entropy with this label smoothing and nothing else, whose gradient an engine may write down; else None."""


def cross_entropy(label_smoothing: float = 0.0) -> Loss:
    """The usual loss of a classifier, with optional label smoothing."""

    def value(network: Network, inputs: Tensor, labels: Tensor, entry: int) -> Tensor:
        return softmax_loss(network(inputs, entry), labels, label_smoothing=label_smoothing)

    return Loss("cross_entropy", lambda setting: value, smoothing=label_smoothing)


LOSSES["cross_entropy"] = cross_entropy
