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
    scale: float

    def to_tensors(self) -> dict[str, Tensor]:
        """Return copies of all of it, and of the random states, by name."""
        tensors = {
            "values": self.values.detach().cpu().clone(),
            "numbers": torch.tensor([float(self.step), self.scale, float(len(self.losses))], dtype=torch.float64),
            "losses": torch.tensor([float(loss) for loss in self.losses], dtype=torch.float64),
            "rates": torch.tensor(self.rates, dtype=torch.float64),
            "random/augment": self.augment.get_state(),
            "random/torch": torch.get_rng_state(),
        }
        if self.values.device.type == "cuda":
            tensors["random/cuda"] = torch.cuda.get_rng_state(self.values.device)
        for number, state in enumerate(self.optimizer):
            for name, tensor in state.items():
                tensors[f"optimizer/{number}/{name}"] = tensor.detach().cpu().clone()
        return tensors

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over a state that `to_tensors` returned; random states are set. `values` are the caller's to load."""
        step, scale, _ = tensors["numbers"].tolist()
        self.step = int(step)
        self.scale = scale
        self.values = tensors["values"]
        self.losses[:] = [loss.to(torch.float32) for loss in tensors["losses"]]
        self.rates[:] = tensors["rates"].tolist()
        self.augment.set_state(tensors["random/augment"])
        torch.set_rng_state(tensors["random/torch"])
        if "random/cuda" in tensors:
            torch.cuda.set_rng_state(tensors["random/cuda"])
        for number, state in enumerate(self.optimizer):
            for name, tensor in state.items():
                tensor.copy_(tensors[f"optimizer/{number}/{name}"])


def resumable(parts: Sequence[Callable[..., object]]) -> bool:
    """Return whether a training with these functions can continue: fedgraft's own hold no state that is not saved."""
    return all(getattr(part, "__module__", "").split(".")[0] == "fedgraft" for part in parts)
