"""More than one model: parts that clients keep, models mixed by similarity, clusters."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fedgraft.aggregate.clusters import Clusters
from fedgraft.aggregate.similarity import crsm
from fedgraft.aggregate.slots import Answers, Mixing, Observe
from fedgraft.algorithms.algorithm import Algorithm, ClientState, vary
from fedgraft.algorithms.averaging import fedavg, given
from fedgraft.core.errors import FedgraftError
from fedgraft.core.protocols import Network
from fedgraft.core.ranges import Count, Few, Inner, NotNegative, Probe, Share, Unit, in_range
from fedgraft.edit.dense import body, everything
from fedgraft.edit.trainable import is_head
from fedgraft.local import self_weight as self_weights
from fedgraft.local.adaptive_start import AdaptiveStart


def fedbabu(**slots: Any) -> Algorithm:
    """Oh et al. 2022: the body is trained and averaged, the head stays at its start; fine-tuned at evaluation."""
    return vary(fedavg(**{"trainable": body(), **given(slots)}), name="fedbabu", fixed_head=True)


def _mixed(
    algorithm: Algorithm,
    similarity: str,
    constant: float,
    samples: int,
    absent: str,
    probe: int,
    noise: float,
    self_weight: float | None,
    aside: float,
) -> Algorithm:
    """The algorithm with one model per client, mixed by this similarity."""
    options = {"c": constant} if similarity == "constant" else {}
    labels = Observe("labels", (), {"labels": ("classes",)})
    shown, seen = {"samples": samples, "noise": noise}, {"probe": probe, "noise": noise}
    of_probe = Observe("probe_representation", (), {"probe_representation": (probe, "width")}, seen, True)
    sources: dict[str, tuple[str, tuple[Observe, ...]]] = {
        "constant": ("", ()),
        "label_histogram": ("labels", (labels,)),
        "groups": ("labels", (labels,)),
        "probe_cka": ("probe_representation", (of_probe,)),
    }
    own = Observe("representation", (), {"representation": (samples, "width")}, shown)
    field, wants = sources.get(similarity, ("representation", (own,)))

    def rows(answers: Answers) -> Tensor:
        shown = [e[field] for e in answers.evidence] if field else [torch.zeros(1)] * len(answers.clients)
        return crsm(shown, similarity, **options)

    mixing, kept = Mixing(f"mixture:{similarity}", rows, wants, absent == "keep"), 0.0
    if similarity == "learned":
        mixing, kept = replace(mixing, **_learned(self_weight, aside)), aside if self_weight is None else 0.0
    elif self_weight is not None:
        raise FedgraftError("algorithm.self_weight fixes what similarity='learned' would learn; set that, or leave it.")
    return vary(algorithm, aggregate=mixing, client_state=ClientState(aside=kept))


def _learned(fixed: float | None, aside: float) -> dict[str, Any]:
    """The slots of a mixing whose self-weights clients report, or that has the same for all."""

    def rows(answers: Answers) -> Tensor:
        told = [fixed if fixed is not None else s["self_weight"] for s in answers.scalars]
        return self_weights.self_weight_similarity(torch.tensor(told), answers.examples)

    asks = (Observe("self_weight", ("self_weight",), options={"aside": aside}),)
    return {"similarity": rows, "wants": () if fixed is not None else asks, "shows_mean": fixed is None}


@in_range
def fedshibu(
    similarity: str = "cka_linear",
    constant: Unit = 1.0,
    samples: Few = 64,
    absent: str = "keep",
    probe: Probe = 256,
    noise: NotNegative = 0.0,
    self_weight: Unit | None = None,
    aside: Inner = 0.2,
    **slots: Any,
) -> Algorithm:
    """One body per client, mixed by representation similarity; the head stays at its start. Constant 1 is FedBABU.

    Unlike the source: a similarity counts times the other client's number of images.
    """
    made = vary(fedbabu(**slots), name="fedshibu")
    return _mixed(made, similarity, constant, samples, absent, probe, noise, self_weight, aside)


@in_range
def fedavg_crsm(
    similarity: str = "cka_linear",
    constant: Unit = 1.0,
    samples: Few = 64,
    absent: str = "keep",
    probe: Probe = 256,
    noise: NotNegative = 0.0,
    self_weight: Unit | None = None,
    aside: Inner = 0.2,
    **slots: Any,
) -> Algorithm:
    """The same mixing on whatever trains, head included. Constant 1 is FedAvg.

    Unlike the source: a similarity counts times the other client's number of images.
    """
    made = vary(fedavg(**slots), name="fedavg_crsm")
    return _mixed(made, similarity, constant, samples, absent, probe, noise, self_weight, aside)


def local_only(**slots: Any) -> Algorithm:
    """Nobody shares anything: every client trains alone. The floor that sharing has to beat."""
    alone = Mixing("alone", lambda answers: torch.eye(len(answers.clients), dtype=torch.float64), shares=False)
    return vary(fedavg(**slots), name="local_only", aggregate=alone)


def fedper(**slots: Any) -> Algorithm:
    """Arivazhagan et al. 2019: a common body, a private head, trained together."""
    return vary(fedavg(**{"trainable": everything(), **given(slots)}), name="fedper", client_state=ClientState(is_head))


def fedrep(**slots: Any) -> Algorithm:
    """Collins et al. 2021: a private head trained first, then the common body.

    Unlike the paper's: head and body take equally many steps.
    """
    return vary(fedper(**slots), name="fedrep", client_state=ClientState(is_head, alternate=True))


@in_range
def ditto(pull: NotNegative = 0.1, **slots: Any) -> Algorithm:
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


@in_range
def fedala(rate: NotNegative = 1.0, share: Share = 0.8, blocks: Count = 1, **slots: Any) -> Algorithm:
    """Zhang et al. 2023: each client starts between its last model and the common one; rate 0 is FedAvg.

    Unlike the paper's: evaluated with the weights learned in the round the client last trained in.
    """
    return vary(fedavg(**slots), name="fedala", client_state=ClientState(start=AdaptiveStart(rate, share, blocks)))


@in_range
def ifca(clusters: Count = 2, **slots: Any) -> Algorithm:
    """Ghosh et al. 2020: several common models, each client trains the one that fits it; one cluster is FedAvg."""
    return vary(fedavg(**slots), name="ifca", aggregate=Clusters(clusters))
