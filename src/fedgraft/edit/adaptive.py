"""Sparsity that follows the clients' drift: raised step by step as training calms down (the AdaQuo idea).

A pure state machine: nothing is remembered outside `AdaptiveState`, so a resumed run continues where it was.
"""

from __future__ import annotations

from dataclasses import dataclass

from fedgraft.core.errors import FedgraftError


@dataclass(frozen=True)
class AdaptiveState:
    """The present sparsity (fraction frozen), calm rounds in a row, and rounds since the last change."""

    sparsity: float
    calm: int = 0
    waited: int = 0


@dataclass(frozen=True)
class AdaptiveSparsity:
    """Raise sparsity by `step` towards `target` once drift stays below its limit, or when it is time anyway."""

    start: float
    target: float
    step: float = 0.1
    drift_limit: float = 0.5
    """Mean drift of the clients below which a round counts as calm."""
    patience: int = 2
    """Calm rounds in a row that are needed."""
    force_every: int = 15
    """Rounds after which sparsity is raised whatever the drift; 0 for never."""

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.target < 1:
            raise FedgraftError(f"adaptive sparsity from {self.start} to {self.target}: use 0 <= start <= target < 1")
        if self.step <= 0 or self.patience < 1 or self.force_every < 0:
            raise FedgraftError("adaptive sparsity needs step > 0, patience >= 1 and force_every >= 0")

    def begin(self) -> AdaptiveState:
        """The state before the first round."""
        return AdaptiveState(self.start)

    def after(self, state: AdaptiveState, drift: float) -> AdaptiveState:
        """The state after a round in which the clients drifted this much on average."""
        calm = state.calm + 1 if drift < self.drift_limit else 0
        waited = state.waited + 1
        due = calm >= self.patience or (self.force_every > 0 and waited >= self.force_every)
        if not due or state.sparsity >= self.target:
            return AdaptiveState(state.sparsity, calm, waited)
        return AdaptiveState(min(self.target, round(state.sparsity + self.step, 12)))
