"""Progress inside local training: everything from which a training that was interrupted continues to the same bits.

Rows and their order follow from the seed, so they are drawn again. What cannot be drawn again is here: the values, the
optimizer's state, the random generators, the losses so far. Losses, corrections and optimizers of the user's own may
hold state of theirs, which nobody can see: with them a training begins anew.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from fedgraft.core.device import Device, fetch
from fedgraft.local.loss_scale import LossScale


class TrainingProgress(Protocol):
    """Where the progress of one training is kept."""

    def load(self) -> dict[str, Tensor] | None:
        """Return the progress that was saved last; None if there is none."""
        ...

    def due(self) -> bool:
        """Return whether it is time to save."""
        ...

    def save(self, tensors: Mapping[str, Tensor]) -> None:
        """Save progress in place of the earlier one."""
        ...


@dataclass
class Snapshot:
    """The state of a training between two steps."""

    step: int
    """Steps that are done."""
    values: Tensor
    optimizer: list[dict[str, Tensor]]
    """The optimizer's state by parameter group; restored in place."""
    augment: torch.Generator
    losses: list[Tensor]
    rates: list[float]
    skipped: int = 0
    """Steps whose gradient was not finite at any scale."""
    loss_scale: LossScale | None = None
    """The scale of float16; None in other precisions."""

    def to_tensors(self) -> dict[str, Tensor]:
        """Return copies of all of it, and of the random states, by name."""
        losses = torch.zeros(0)
        if self.losses:
            losses = fetch(torch.stack(self.losses)).clone()
        tensors = {
            "values": fetch(self.values.detach()).clone(),
            "numbers": torch.tensor([self.step, self.skipped], dtype=torch.int64),
            "losses": losses,
            "rates": torch.tensor(self.rates, dtype=torch.float64),
            "random/augment": self.augment.get_state(),
            "random/torch": torch.get_rng_state(),
        }
        if self.values.device.type == "cuda":
            tensors["random/cuda"] = torch.cuda.get_rng_state(self.values.device)
        if self.loss_scale is not None:
            scale = self.loss_scale
            tensors["loss_scale"] = torch.tensor([scale.factor, scale.clean, scale.retried], dtype=torch.float64)
        for number, state in enumerate(self.optimizer):
            for name, tensor in state.items():
                tensors[f"optimizer/{number}/{name}"] = fetch(tensor.detach()).clone()
        return tensors

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over a state that `to_tensors` returned; random states are set. `values` are the caller's to load."""
        self.step, self.skipped = tensors["numbers"].tolist()
        device = Device(self.values.device)
        self.values = device.put(tensors["values"])
        self.losses[:] = list(device.put(tensors["losses"]))
        self.rates[:] = tensors["rates"].tolist()
        self.augment.set_state(tensors["random/augment"])
        torch.set_rng_state(tensors["random/torch"])
        if "random/cuda" in tensors:
            torch.cuda.set_rng_state(tensors["random/cuda"])
        if self.loss_scale is not None:
            factor, clean, retried = tensors["loss_scale"].tolist()
            self.loss_scale.factor = factor
            self.loss_scale.clean = int(clean)
            self.loss_scale.retried = int(retried)
        for number, state in enumerate(self.optimizer):
            for name, tensor in state.items():
                tensor.copy_(tensors[f"optimizer/{number}/{name}"])


def resumable(parts: Sequence[Callable[..., object]]) -> bool:
    """Return whether a training with these functions can continue: fedgraft's own hold no state that is not saved."""
    return all(getattr(part, "__module__", "").split(".")[0] == "fedgraft" for part in parts)
