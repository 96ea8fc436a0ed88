"""What a run leaves to see of representations: alignment by client and layer, and the mixing matrices of a few rounds.

Alignment stands in every line of metrics.jsonl (FedAlignAvg with scores of the clients); matrices of mixing (FedSHIBU)
are kept as small files in the folder of figures.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedgraft.config.load import Config
from fedgraft.core.errors import FedgraftError
from fedgraft.core.files import write_atomic

if TYPE_CHECKING:  # a page that shows no matrix needs no torch
    from torch import Tensor

    from fedgraft.server.round import RoundSummary

_MOST_CLIENTS = 200  # a larger matrix is a picture of nothing


def by_client(lines: Sequence[Mapping[str, Any]]) -> dict[int, dict[str, float]]:
    """Scores by client and layer, clients in order, each the mean over the rounds the client took part in.

    The last round alone would say nothing where the learning rate ends at zero: every score is then 1.
    """
    found: dict[int, list[dict[str, float]]] = {}
    for line in lines:
        for at, client in enumerate(line["clients"]["ids"]):
            scores = {layer: values[at] for layer, values in line["alignment"].items()}
            found.setdefault(client, []).append(scores)
    return {
        client: {layer: sum(s[layer] for s in rounds) / len(rounds) for layer in rounds[0]}
        for client, rounds in sorted(found.items())
    }


def shown_rounds(config: Config) -> set[int]:
    """Rounds (counted from one) whose mixing matrix is kept."""
    total = config.rounds.total
    return set(config.track.mixing_rounds) or {1, (total + 1) // 2, total}


def keep_mixing(run: Path, config: Config, summary: RoundSummary) -> None:
    """Store the mixing matrix of a round that is to be shown; a resumed run writes the same bytes again."""
    number = summary.round + 1
    if "mixing" not in summary.extra or number not in shown_rounds(config):
        return
    import safetensors.torch
    import torch

    ids = torch.tensor(summary.record["clients"]["ids"])
    tensors = {"mixing": summary.extra["mixing"].float().contiguous(), "clients": ids}
    path = _mixing_file(run, number)
    try:
        path.parent.mkdir(exist_ok=True)
        write_atomic(path, [safetensors.torch.save(tensors)])
    except OSError as error:
        raise FedgraftError(f"{path} could not be written ({error.strerror}); make room and resume the run.") from error


def _mixing_file(run: Path, number: int) -> Path:
    return run / "figures" / f"crsm-round-{number:06d}.safetensors"


def read_mixing(run: Path, clients: int) -> dict[str, Tensor]:
    """The kept matrices by round. Cohorts differ from round to round, so each is shown among all clients, with gaps."""
    found = {}
    for path in sorted((run / "figures").glob("crsm-round-*.safetensors")):
        import safetensors.torch
        import torch

        tensors = safetensors.torch.load(path.read_bytes())
        matrix, ids = tensors["mixing"], tensors["clients"]
        every = max(clients, int(ids.max()) + 1)
        if every <= _MOST_CLIENTS:
            full = torch.full((every, every), torch.nan)
            full[ids[:, None], ids[None, :]] = matrix
            matrix = full
        found[f"round {int(path.stem.rsplit('-', 1)[1])}"] = matrix
    return found
