"""Representations in a run's report: alignment by client and layer, and the matrices between clients of a few rounds.

Alignment is in every line of metrics.jsonl (FedAlignAvg with scores of the clients). The similarity of clients and the
mixing weights that follow from it (FedSHIBU) are stored as one small file a round in the folder of figures.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedgraft.config.load import Config
from fedgraft.core.errors import FedgraftError
from fedgraft.core.store import write_atomic

if TYPE_CHECKING:
    from fedgraft.server.round import RoundSummary

_FULL_MATRIX = 200  # clients up to which a cohort's matrix is embedded in that of all clients


def by_client(lines: Sequence[Mapping[str, Any]]) -> dict[int, dict[str, float]]:
    """Return alignment scores by client and layer, clients in order, each the mean over the client's rounds.

    `lines` are those of metrics.jsonl that have scores. The last round alone would be uninformative if the learning
    rate ends at zero: every score is then 1.
    """
    scores: dict[int, list[dict[str, float]]] = {}
    for line in lines:
        for position, client in enumerate(line["clients"]["ids"]):
            by_layer = {layer: values[position] for layer, values in line["alignment"].items()}
            scores.setdefault(client, []).append(by_layer)
    means: dict[int, dict[str, float]] = {}
    for client, rounds in sorted(scores.items()):
        means[client] = {}
        for layer in rounds[0]:
            means[client][layer] = sum(by_layer[layer] for by_layer in rounds) / len(rounds)
    return means


def stored_rounds(config: Config) -> set[int]:
    """Return the rounds (counted from one) whose matrices between clients a run stores: as configured, else three."""
    total = config.rounds.total
    return set(config.track.mixing_rounds) or {1, (total + 1) // 2, total}


def store_mixing(run: Path, config: Config, summary: RoundSummary) -> None:
    """Store the similarity and the mixing weights of a round in the folder of figures, if it is one of `stored_rounds`.

    `run` is the run folder. A resumed run writes the same bytes again.
    """
    number = summary.round + 1
    if "mixing" not in summary.extra or number not in stored_rounds(config):
        return
    import safetensors.torch
    import torch

    ids = torch.tensor(summary.record["clients"]["ids"])
    tensors = {"clients": ids}
    for name in ("mixing", "similarity"):
        if name in summary.extra:
            tensors[name] = summary.extra[name].float().contiguous()
    path = _mixing_file(run, number)
    try:
        path.parent.mkdir(exist_ok=True)
        write_atomic(path, [safetensors.torch.save(tensors)])
    except OSError as error:
        raise FedgraftError(
            "E-REPORT-WRITE",
            f"{path} could not be written ({error.strerror})",
            "make room and resume the run",
            path=str(path),
        ) from error


def _mixing_file(run: Path, number: int) -> Path:
    """Return the path of a round's matrices between clients."""
    return run / "figures" / f"crsm-round-{number:06d}.safetensors"


def mixing_rounds(run: Path) -> list[int]:
    """Return the rounds whose mixing matrix is stored in the run folder `run`, in order."""
    rounds = []
    for path in (run / "figures").glob("crsm-round-*.safetensors"):
        rounds.append(int(path.stem.rsplit("-", 1)[1]))
    return sorted(rounds)


def read_mixing_round(run: Path, number: int, clients: int) -> np.ndarray:
    """Return the stored mixing weights of round `number` of the run folder `run`.

    They are among all `clients`, NaN for those outside the round's cohort; of many clients only the cohort's.
    """
    matrix, ids = _stored_matrix(run, number, "mixing")
    assert matrix is not None  # each file has one
    return _among_all(matrix, ids, clients)


def read_similarity_round(run: Path, number: int, clients: int) -> np.ndarray | None:
    """Return the stored similarity of clients in round `number`, shaped as by `read_mixing_round`.

    The diagonal is NaN: a client is as similar to itself as can be, and that one colour would hide all others. None:
    the run is of a version that stored only mixing weights.
    """
    matrix, ids = _stored_matrix(run, number, "similarity")
    if matrix is None:
        return None
    masked = matrix.copy()
    np.fill_diagonal(masked, np.nan)
    return _among_all(masked, ids, clients)


def read_mixing(run: Path, clients: int) -> dict[str, np.ndarray]:
    """Return the stored mixing weights of the run folder `run`, by "round N", each as `read_mixing_round` does."""
    matrices = {}
    for number in mixing_rounds(run):
        matrices[f"round {number}"] = read_mixing_round(run, number, clients)
    return matrices


def read_similarity(run: Path, clients: int) -> dict[str, np.ndarray]:
    """Return the stored similarities of the run folder `run`, by "round N", each as `read_similarity_round` does."""
    matrices = {}
    for number in mixing_rounds(run):
        matrix = read_similarity_round(run, number, clients)
        if matrix is not None:
            matrices[f"round {number}"] = matrix
    return matrices


def _stored_matrix(run: Path, number: int, name: str) -> tuple[np.ndarray | None, np.ndarray]:
    """Return a stored matrix (m, m) of round `number`, None if the file lacks it, and the cohort's m clients."""
    import safetensors.numpy

    tensors = safetensors.numpy.load(_mixing_file(run, number).read_bytes())
    return tensors.get(name), tensors["clients"]


def _among_all(matrix: np.ndarray, ids: np.ndarray, clients: int) -> np.ndarray:
    """Return a cohort's matrix among all clients, NaN elsewhere; beyond `_FULL_MATRIX` clients the cohort's alone."""
    all_clients = max(clients, int(ids.max()) + 1)
    if all_clients > _FULL_MATRIX:
        return matrix
    full = np.full((all_clients, all_clients), np.nan)
    full[ids[:, None], ids[None, :]] = matrix
    return full
