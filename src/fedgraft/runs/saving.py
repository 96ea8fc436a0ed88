"""What a checkpoint of a run holds, in both directions; and what its privacy account says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fedgraft.algorithms.algorithm import Algorithm
from fedgraft.config.build import budget
from fedgraft.config.options import Config
from fedgraft.core.state import Memories, ServerState, to_tensors
from fedgraft.runs.open_run import OpenRun
from fedgraft.runs.setup import RunSetup

UNMEASURED = -1e9
"""The score of a model that nobody validated: every measured one is better."""


@dataclass(frozen=True)
class Best:
    """The best model by validation so far, and how long ago that was."""

    accuracy: float = -1.0
    """Its accuracy; the one it was chosen by is `score`."""
    score: float = UNMEASURED
    round: int = -1
    stale: int = 0
    vector: Tensor | None = None


def selected(metric: str, best: Best) -> dict[str, float]:
    """The metric that chose the best model, where it is not the accuracy."""
    return {} if metric == "accuracy" or best.round < 0 or best.score == UNMEASURED else {metric: abs(best.score)}


def pack_run(
    setup: RunSetup, opened: OpenRun, state: ServerState, memories: Memories, best: Best
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Everything that a resumed run needs, as named tensors and plain numbers."""
    tensors, meta = to_tensors(state, memories)
    tensors["head"] = opened.head
    tensors |= {f"edit/{key}": value for key, value in opened.trainable.stored.items()}
    if best.vector is not None:
        tensors["best/vector"] = best.vector
    meta |= {
        "space": opened.space.digest,
        "best": {"accuracy": best.accuracy, "score": best.score, "round": best.round, "stale": best.stale},
    }
    meta["classes"] = list(setup.task.data.dataset.classes)  # the outputs must be named where the data is not at hand
    if not setup.task.data.rows_known:
        meta["elsewhere"] = True
    return tensors, meta


def saved_edit(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What a checkpoint or a message holds of the opened edit space."""
    return {name.removeprefix("edit/"): t for name, t in tensors.items() if name.startswith("edit/")}


def protection_of(algorithm: Algorithm) -> str:
    """How a round's updates were protected, for its line in the log."""
    return ", ".join(algorithm.privacy.labels()) or "none"


def account_of(config: Config, algorithm: Algorithm, rounds: int, lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What differential privacy has spent, and what its account does not cover; nothing without it."""
    account, dp = budget(config, algorithm, rounds), config.privacy.dp
    if account is None or dp is None:
        return {}
    told: dict[str, Any] = {
        "epsilon": account.epsilon,
        "epsilon_without_amplification": account.unamplified,
        "delta": account.delta,
        "unit": "client",
        "noise": account.noise,
        "sampling": account.probability,
        "rounds": account.spent,
        "not_covered": algorithm.privacy.uncovered(),
        "repeatable_noise": not (algorithm.privacy.noise and algorithm.privacy.noise.bound),
    }
    if algorithm.privacy.collects_sum:
        told["aborted"] = sum("aborted" in line for line in lines)
    return {"privacy": told}
