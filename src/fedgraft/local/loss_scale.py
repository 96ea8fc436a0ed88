"""The loss scale of float16: gradients too small for half precision are multiplied before, and divided afterwards.

A scale that is too large overflows. Then the same gradient is computed again with half of it, so that no step is lost,
and the client remembers the scale for its next request. After many clean steps it is doubled again (Micikevicius et
al. 2018).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

LOSS_SCALE = "loss_scale"
"""The entry of a client's memory: the scale, and the clean steps since it last changed."""
FIRST = 2.0**16
SMALLEST = 2.0**-16
CLEAN_STEPS = 2000
"""Steps without an overflow after which the scale is doubled."""


class HasGradient(Protocol):
    """What collects the gradient of a backward pass; `local.train.Flat` does."""

    def gradient(self) -> Tensor:
        """Return the gradients of the last backward pass as one vector, which the next call reuses; clear them."""
        ...


@dataclass
class LossScale:
    """The scale of one client while it trains; it changes with every overflow."""

    factor: float = FIRST
    clean: int = 0
    retried: int = 0
    """Gradients that were computed again with a smaller scale."""

    @classmethod
    def remembered(cls, memory: Mapping[str, Tensor]) -> LossScale:
        """Return the scale that this client's memory holds; the first one if it holds none."""
        if LOSS_SCALE not in memory:
            return cls(FIRST)
        factor, clean = memory[LOSS_SCALE].tolist()
        return cls(factor, int(clean))

    def as_memory(self) -> dict[str, Tensor]:
        """Return the entry of the client's memory."""
        return {LOSS_SCALE: torch.tensor([self.factor, self.clean], dtype=torch.float64)}

    def gradient(self, loss: Tensor, flat: HasGradient) -> Tensor | None:
        """Return the gradient of this loss, computed with a scale at which it is finite; None if there is none.

        There is none if the loss itself is not finite, or its gradient at any scale. The scale then stays as it was.
        The vector is that of `flat.gradient()`, which the next call reuses. Clean and repeated passes are counted.
        """
        before = self.factor
        while True:
            (loss * self.factor).backward(retain_graph=True)
            gradient = flat.gradient().div_(self.factor)
            if bool(torch.isfinite(gradient).all()):
                self._count_clean()
                return gradient
            if self.factor <= SMALLEST or not bool(torch.isfinite(loss)):
                self.factor = before
                return None
            self.factor /= 2
            self.clean = 0
            self.retried += 1

    def _count_clean(self) -> None:
        """Count a step without overflow; double the scale after enough of them."""
        self.clean += 1
        if self.clean >= CLEAN_STEPS:
            self.factor *= 2
            self.clean = 0
