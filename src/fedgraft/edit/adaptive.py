"""Adaptive sparsity: raised step by step once the clients' drift is small (the AdaQuo idea).

A pure state machine: all its memory is in `AdaptiveState`, so a resumed run continues where it was interrupted.
"""

from __future__ import annotations

from dataclasses import dataclass

from fedgraft.core.errors import FedgraftError


@dataclass(frozen=True)
class AdaptiveState:
    """The present sparsity (fraction frozen), consecutive calm rounds, and rounds since the last change."""

    sparsity: float
    calm: int = 0
    waited: int = 0


@dataclass(frozen=True)
class AdaptiveSparsity:
    """Raise sparsity by `step` towards `target` once drift stays below its limit, or every `force_every` rounds."""

    start: float
    target: float
    step: float = 0.1
    drift_limit: float = 0.5
    """Mean drift of the clients below which a round counts as calm."""
    patience: int = 2
    """Number of consecutive calm rounds before sparsity is raised."""
    force_every: int = 15
    """Rounds after which sparsity is raised whatever the drift; 0 for never."""

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.target < 1:
            raise FedgraftError(
                "E-EDIT-ADAPTIVE-RANGE",
                f"adaptive sparsity cannot go from {self.start} to {self.target}",
                "use 0 <= start <= target < 1",
                start=self.start,
                target=self.target,
            )
        if self.step <= 0 or self.patience < 1 or self.force_every < 0:
            raise FedgraftError(
                "E-EDIT-ADAPTIVE-OPTIONS",
                f"adaptive sparsity has step {self.step}, patience {self.patience}, force_every {self.force_every}",
                "use step > 0, patience >= 1 and force_every >= 0",
            )

    def begin(self) -> AdaptiveState:
        """Return the state before the first round."""
        return AdaptiveState(self.start)

    def after(self, state: AdaptiveState, drift: float) -> AdaptiveState:
        """Return the state after a round with this mean drift of the clients."""
        calm = 0
        if drift < self.drift_limit:
            calm = state.calm + 1
        waited = state.waited + 1
        due = calm >= self.patience or (self.force_every > 0 and waited >= self.force_every)
        if not due or state.sparsity >= self.target:
            return AdaptiveState(state.sparsity, calm, waited)
        return AdaptiveState(min(self.target, round(state.sparsity + self.step, 12)))
