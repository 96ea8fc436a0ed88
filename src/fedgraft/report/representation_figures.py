"""Figures about representations, from what a run leaves: alignment by client and layer, and mixing matrices.

Alignment stands in every line of metrics.jsonl (FedAlignAvg with scores of the clients): its distribution by layer
(F22), by client and layer (F23), and its distance to one over rounds (F24). Of a mixture (FedSHIBU) the matrices of a
few rounds are kept as small files beside the figures and drawn side by side (F27).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from torch import Tensor

from fedgraft.config.load import Config
from fedgraft.report import figures
from fedgraft.round import RoundSummary
from fedgraft.runs.checkpoint import write_atomic

Lines = Sequence[Mapping[str, Any]]
_MOST_CLIENTS = 200  # a larger matrix is a picture of nothing


def draw_all(run: Path, lines: Lines, clients: int) -> list[Path]:
    """Every figure of this module that the run has data for, into its folder of figures."""
    folder = run / "figures"
    folder.mkdir(exist_ok=True)
    aligned = [line for line in lines if line.get("alignment")]
    drawn = []
    if aligned:
        drawn = [
            figures.draw("F22", folder / "svcca_layers.png", by_layer(aligned)),
            _client_map(folder / "svcca_clients.png", aligned),
            figures.draw("F24", folder / "drift.png", drift(aligned)),
        ]
    if kept := read_mixing(run, clients):
        drawn.append(figures.draw("F27", folder / "mixing.png", kept))
    return drawn


def by_layer(lines: Lines) -> dict[str, list[float]]:
    """The mean score of every client that ever answered, by layer."""
    means = by_client(lines)
    layers = next(iter(means.values())).keys()
    return {layer: [scores[layer] for scores in means.values()] for layer in layers}


def by_client(lines: Lines) -> dict[int, dict[str, float]]:
    """Scores by client and layer, clients in order, each the mean over the rounds the client took part in.

    The last round alone would say nothing where the learning rate ends at zero: every score is then 1.
    """
    found: dict[int, list[dict[str, float]]] = {}
    for line in lines:
        for context, client in enumerate(line["clients"]["ids"]):
            scores = {layer: values[context] for layer, values in line["alignment"].items()}
            found.setdefault(client, []).append(scores)
    return {
        client: {layer: sum(s[layer] for s in rounds) / len(rounds) for layer in rounds[0]}
        for client, rounds in sorted(found.items())
    }


def _client_map(path: Path, lines: Lines) -> Path:
    means = dict(list(by_client(lines).items())[:_MOST_CLIENTS])
    layers = list(next(iter(means.values())))
    matrix = [[scores[layer] for layer in layers] for scores in means.values()]
    return figures.draw("F23", path, matrix, labels=(list(means), layers))


def drift(lines: Lines) -> dict[str, tuple[list[int], list[float], list[float]]]:
    """1 - SVCCA by layer over rounds: the mean over the round's clients, and their standard deviation."""
    rounds = [line["round"] for line in lines]
    series = {}
    for layer in lines[0]["alignment"]:
        scores = [np.asarray(line["alignment"][layer], dtype=float) for line in lines]
        series[layer] = (rounds, [float(1 - s.mean()) for s in scores], [float(s.std()) for s in scores])
    return series


def shown_rounds(config: Config) -> set[int]:
    """Rounds (counted from one) whose mixing matrix is kept."""
    total = config.rounds.total
    return set(config.track.mixing_rounds) or {1, (total + 1) // 2, total}


def keep_mixing(run: Path, config: Config, summary: RoundSummary) -> None:
    """Store the mixing matrix of a round that is to be shown; a resumed run writes the same bytes again."""
    number = summary.round + 1
    if "mixing" not in summary.extra or number not in shown_rounds(config):
        return
    ids = torch.tensor(summary.record["clients"]["ids"])
    tensors = {"mixing": summary.extra["mixing"].float().contiguous(), "clients": ids}
    path = _mixing_file(run, number)
    path.parent.mkdir(exist_ok=True)
    write_atomic(path, [safetensors.torch.save(tensors)])


def _mixing_file(run: Path, number: int) -> Path:
    return run / "figures" / f"crsm-round-{number:06d}.safetensors"


def read_mixing(run: Path, clients: int) -> dict[str, Tensor]:
    """The kept matrices by round. Cohorts differ from round to round, so each is shown among all clients, with gaps."""
    found = {}
    for path in sorted((run / "figures").glob("crsm-round-*.safetensors")):
        tensors = safetensors.torch.load(path.read_bytes())
        matrix, ids = tensors["mixing"], tensors["clients"]
        if clients <= _MOST_CLIENTS:
            full = torch.full((clients, clients), torch.nan)
            full[ids[:, None], ids[None, :]] = matrix
            matrix = full
        found[f"round {int(path.stem.rsplit('-', 1)[1])}"] = matrix
    return found
