"""More than one model: parts that clients keep, models mixed by similarity, clusters."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fedgraft.aggregate.clusters import Clusters
from fedgraft.aggregate.similarity import crsm
from fedgraft.aggregate.slots import Answers, Mixing, Observe
from fedgraft.algorithm import Algorithm, ClientState, vary
from fedgraft.edit.dense import body, everything
from fedgraft.edit.trainable import is_head
from fedgraft.local.adaptive_start import AdaptiveStart
from fedgraft.protocols import Network
from fedgraft.zoo.mean import fedavg, given


def fedbabu(**slots: Any) -> Algorithm:
    """Oh et al. 2022: the body is trained and averaged, the head stays at its start; fine-tuned at evaluation."""
    return vary(fedavg(**{"trainable": body(), **given(slots)}), name="fedbabu", fixed_head=True)


def _mixing(similarity: str, constant: float, samples: int, absent: str, probe: int, noise: float) -> Mixing:
    options = {"c": constant} if similarity == "constant" else {}
    sources: dict[str, tuple[str, tuple[Observe, ...]]] = {
        "constant": ("", ()),
        "label_histogram": ("labels", (Observe("labels", (), {"labels": ("classes",)}),)),
        "groups": ("labels", (Observe("labels", (), {"labels": ("classes",)}),)),
        "probe_cka": (
            "probe_representation",
            (
                Observe(
                    "probe_representation",
                    (),
                    {"probe_representation": (probe, "width")},
                    {"probe": probe, "noise": noise},
                    True,
                ),
            ),
        ),
    }
    own = Observe("representation", (), {"representation": (samples, "width")}, {"samples": samples, "noise": noise})
    field, wants = sources.get(similarity, ("representation", (own,)))

    def matrix(answers: Answers) -> Tensor:
        shown = [e[field] for e in answers.evidence] if field else [torch.zeros(1)] * len(answers.clients)
        return crsm(shown, similarity, **options)

    return Mixing(f"mixture:{similarity}", matrix, wants, absent_keep=absent == "keep")


def fedshibu(
    similarity: str = "cka_linear", constant: float = 1.0, samples: int = 64, absent: str = "keep", probe: int = 256,
    noise: float = 0.0, **slots: Any,
) -> Algorithm:  # fmt: skip
    """One body per client, mixed by representation similarity; the head stays at its start. Constant 1 is FedBABU."""
    return vary(
        fedbabu(**slots), name="fedshibu", aggregate=_mixing(similarity, constant, samples, absent, probe, noise)
    )


def fedavg_crsm(
    similarity: str = "cka_linear", constant: float = 1.0, samples: int = 64, absent: str = "keep", probe: int = 256,
    noise: float = 0.0, **slots: Any,
) -> Algorithm:  # fmt: skip
    """The same mixing on whatever trains, head included. Constant 1 is FedAvg."""
    return vary(
        fedavg(**slots), name="fedavg_crsm", aggregate=_mixing(similarity, constant, samples, absent, probe, noise)
    )


def local_only(**slots: Any) -> Algorithm:
    """Nobody shares anything: every client trains alone. The floor that sharing has to beat."""
    alone = Mixing("alone", lambda answers: torch.eye(len(answers.clients), dtype=torch.float64), shares=False)
    return vary(fedavg(**slots), name="local_only", aggregate=alone)


def fedper(**slots: Any) -> Algorithm:
    """Arivazhagan et al. 2019: a common body, a private head, trained together."""
    return vary(fedavg(**{"trainable": everything(), **given(slots)}), name="fedper", client_state=ClientState(is_head))


def fedrep(**slots: Any) -> Algorithm:
    """Collins et al. 2021: a private head trained first, then the common body."""
    return vary(fedper(**slots), name="fedrep", client_state=ClientState(is_head, alternate=True))


def ditto(pull: float = 0.1, **slots: Any) -> Algorithm:
    """Li et al. 2021: beside the common model each client trains its own, pulled towards it."""
    return vary(fedavg(**slots), name="ditto", client_state=ClientState(second_model=pull))


def fedbn(**slots: Any) -> Algorithm:
    """Li et al. 2021: normalisation layers, weights and statistics, stay with the clients; without any it is FedAvg."""
    return vary(
        fedavg(**{"trainable": everything(), **given(slots)}),
        name="fedbn",
        client_state=ClientState(is_normalisation, within=True),
    )


def is_normalisation(network: Network, name: str) -> bool:
    """Whether a parameter or statistic belongs to a normalisation layer of any kind."""
    return "norm" in type(network.get_submodule(name.rpartition(".")[0])).__name__.lower()


def fedala(rate: float = 1.0, share: float = 0.8, blocks: int = 1, **slots: Any) -> Algorithm:
    """Zhang et al. 2023: each client starts between its last model and the common one; rate 0 is FedAvg."""
    return vary(fedavg(**slots), name="fedala", client_state=ClientState(start=AdaptiveStart(rate, share, blocks)))


def ifca(clusters: int = 2, **slots: Any) -> Algorithm:
    """Ghosh et al. 2020: several common models, each client trains the one that fits it; one cluster is FedAvg."""
    return vary(fedavg(**slots), name="ifca", aggregate=Clusters(clusters))
