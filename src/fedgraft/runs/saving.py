"""What a checkpoint of a run holds, in both directions, and what its privacy account reports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from fedgraft.algorithms.algorithm import Algorithm
from fedgraft.config.build import budget
from fedgraft.config.options import Config
from fedgraft.core.state import Memories, ServerState, to_tensors
from fedgraft.runs import memory_store, personal_store
from fedgraft.runs.checkpoint import Checkpoint
from fedgraft.runs.memory_store import MemoryStore
from fedgraft.runs.open_run import OpenRun
from fedgraft.runs.personal_store import PersonalStore
from fedgraft.runs.setup import RunSetup

UNMEASURED = -1e9
"""The score of a model that was not validated: every measured one is better."""


@dataclass(frozen=True)
class Best:
    """The best model by validation so far."""

    accuracy: float = -1.0
    """Its accuracy; the number it was chosen by is `score`."""
    score: float = UNMEASURED
    round: int = -1
    stale: int = 0
    """Evaluations since the last improvement."""
    vector: Tensor | None = None


def selected_score(metric: str, best: Best) -> dict[str, float]:
    """Return the metric that chose the best model; empty where that is the accuracy or nothing was measured."""
    if metric == "accuracy" or best.round < 0 or best.score == UNMEASURED:
        return {}
    return {metric: abs(best.score)}


def pack_run(
    setup: RunSetup, opened: OpenRun, state: ServerState, memories: Memories, best: Best
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return everything that a resumed run needs, as named tensors and plain numbers."""
    tensors, meta = to_tensors(state, memories)
    tensors["head"] = opened.head
    for name, tensor in opened.trainable.stored.items():
        tensors[f"edit/{name}"] = tensor
    if best.vector is not None:
        tensors["best/vector"] = best.vector
    meta["space"] = opened.space.digest
    meta["best"] = {"accuracy": best.accuracy, "score": best.score, "round": best.round, "stale": best.stale}
    meta["classes"] = list(setup.task.data.dataset.classes)  # the outputs must be named where the data is missing
    if not setup.task.data.rows_known:
        meta["elsewhere"] = True
    if setup.task.data.label_sets:
        meta["label_sets"] = True
    return tensors, meta


def saved_edit(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return what a checkpoint or a message holds of the edit space: the tensors under "edit/", without that prefix."""
    prefix = "edit/"
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def client_stores(folder: Path, saved: Checkpoint, limit: float = 0) -> tuple[PersonalStore | None, MemoryStore | None]:
    """Return the clients' models and memories that a checkpoint of the run in `folder` names; None: it holds them.

    `limit` is that of `MemoryStore`. Raise `BadCheckpoint` if a file is missing or damaged.
    """
    models = None
    memories = None
    if personal_store.KIND in saved.meta:
        length = len(saved.tensors["vector"])
        models = PersonalStore.restore(folder / personal_store.KIND, length, saved.meta[personal_store.KIND])
    if memory_store.KIND in saved.meta:
        memories = MemoryStore.restore(folder / memory_store.KIND, limit, saved.meta[memory_store.KIND])
    return models, memories


def protection_label(algorithm: Algorithm) -> str:
    """Return how a round's updates are protected, in words, for its line in the log."""
    return ", ".join(algorithm.privacy.labels()) or "none"


def account_of(
    config: Config,
    algorithm: Algorithm,
    rounds: int,
    lines: Sequence[Mapping[str, Any]],
    images: Mapping[str, int] | None = None,
) -> dict[str, Any]:
    """Return {"privacy": what `rounds` rounds have spent and what that does not cover}; {} without privacy noise.

    `lines` are the recorded rounds, in which aborted secure sums are counted; `images` are the training images of each
    client that trains, by its name, which an account of records needs.
    """
    if algorithm.privacy.records is not None:
        of_records = records_account(algorithm, rounds, images or {})
        if algorithm.privacy.collects_sum:
            of_records["aborted"] = sum("aborted" in line for line in lines)
        return {"privacy": of_records}
    account = budget(config, algorithm, rounds)
    if account is None or config.privacy.dp is None:
        return {}
    noise = algorithm.privacy.noise
    follows_secret = noise is not None and noise.bound_to_sum
    record: dict[str, Any] = {
        "epsilon": account.epsilon,
        "epsilon_without_amplification": account.unamplified,
        "delta": account.delta,
        "unit": "client",
        "noise": account.noise,
        "sampling": account.probability,
        "rounds": account.spent,
        "not_covered": algorithm.privacy.uncovered(),
        "repeatable_noise": not follows_secret,
    }
    if algorithm.privacy.collects_sum:
        record["aborted"] = sum("aborted" in line for line in lines)
    return {"privacy": record}


def records_account(algorithm: Algorithm, rounds: int, images: Mapping[str, int]) -> dict[str, Any]:
    """Return what an account of records says of so many rounds: the largest epsilon, and that of each client.

    Every client counts as taking part in every round. `images` are the clients' training images by name.
    """
    record = algorithm.privacy.records
    assert record is not None
    clients: dict[str, dict[str, Any]] = {}
    for number, (name, count) in enumerate(images.items()):
        account = record.account(count, algorithm.local.of(number))
        clients[name] = {
            "epsilon": account.epsilon(rounds),
            "epsilon_without_amplification": account.unamplified(rounds),
            "images": count,
            "sampling": account.probability,
            "noise": account.noise,
            "steps": rounds * account.steps,
        }
    return {
        "epsilon": max((client["epsilon"] for client in clients.values()), default=0.0),
        "epsilon_without_amplification": max(
            (client["epsilon_without_amplification"] for client in clients.values()), default=0.0
        ),
        "delta": record.delta,
        "unit": "record",
        "rounds": rounds,
        "clip": record.clip,
        "clients": clients,
        "not_covered": algorithm.privacy.uncovered(),
        "repeatable_noise": not record.secret,
    }
