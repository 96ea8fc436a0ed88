"""Personalized algorithms: private parts, models mixed by similarity, clusters, second models."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from fedgraft.aggregate.clusters import Clusters
from fedgraft.aggregate.similarity import crsm
from fedgraft.aggregate.slots import Answers, Mixing, Observe
from fedgraft.algorithms.algorithm import Algorithm, ClientState, vary
from fedgraft.algorithms.averaging import fedavg, specified
from fedgraft.core.capabilities import Capability
from fedgraft.core.errors import FedgraftError
from fedgraft.core.protocols import Network
from fedgraft.core.ranges import Count, Few, Inner, NotNegative, Probe, Share, Unit, in_range
from fedgraft.edit.dense import body, everything
from fedgraft.edit.trainable import is_head
from fedgraft.local import self_weight as self_weights
from fedgraft.local.adaptive_start import AdaptiveStart

Similarity = Literal[
    "cka_linear",
    "cka_shuffled",
    "cka_rbf",
    "cka_debiased",
    "covariance",
    "probe_cka",
    "label_histogram",
    "groups",
    "constant",
    "rsa",
    "learned",
]
"""How two clients are compared: a name of `aggregate.similarity.SIMILARITIES`, or `learned` by the clients."""


def fedbabu(**slots: Any) -> Algorithm:
    """Oh et al. 2022: the body is trained and averaged, the head is frozen; fine-tuned for evaluation."""
    return vary(fedavg(**{"trainable": body(), **specified(slots)}), name="fedbabu", fixed_head=True)


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
    """Return the algorithm with one model per client, mixed by this similarity.

    Args:
        similarity: a name of `SIMILARITIES`, or "learned": the weight of each client's own model is learned.
        constant: the similarity of any two clients under "constant".
        samples: images whose representations a client reports.
        absent: "keep": clients outside the cohort keep their model.
        probe: images that all clients share, where representations of one probe are compared.
        noise: standard deviation of the noise on reported representations.
        self_weight: under "learned", a fixed weight of the own model; None: learned.
        aside: under "learned", share of the images on which it is learned.
    """
    absent_keep = absent == "keep"
    if similarity == "learned":
        mixing = _self_weighted_mixing(self_weight, aside, absent_keep)
        if self_weight is not None:
            aside = 0.0
        return vary(algorithm, aggregate=mixing, client_state=ClientState(aside=aside))
    if self_weight is not None:
        raise FedgraftError(
            "E-ALGORITHM-SELF-WEIGHT",
            f"algorithm.self_weight has no effect with similarity={similarity!r}",
            "set similarity='learned', whose learned weight it replaces, or leave it out",
            similarity=similarity,
        )
    options = {}
    if similarity == "constant":
        options["c"] = constant
    evidence, observation = _mixing_evidence(similarity, samples, probe, noise)

    def matrix(answers: Answers) -> Tensor:
        """Return the similarity matrix (m, m) of the clients' reports."""
        if observation is None:
            representations = [torch.zeros(1)] * len(answers.clients)
        else:
            representations = [tensors[evidence] for tensors in answers.evidence]
        return crsm(representations, similarity, **options)

    wants: tuple[Observe, ...] = ()
    if observation is not None:
        wants = (observation,)
    mixing = Mixing(f"mixture:{similarity}", matrix, wants, absent_keep)
    return vary(algorithm, aggregate=mixing, client_state=ClientState())


def _mixing_evidence(similarity: str, samples: int, probe: int, noise: float) -> tuple[str, Observe | None]:
    """Return the name of the reported tensor that the similarity compares, and the observation that reports it.

    `samples` (own images), `probe` (shared images) and `noise` are as in `_mixed`. ("", None): clients report nothing.
    """
    if similarity == "constant":
        return "", None
    if similarity in ("label_histogram", "groups"):
        return "labels", Observe("labels", (), {"labels": ("classes",)})
    if similarity == "probe_cka":
        name = "probe_representation"
        probe_options = {"probe": probe, "noise": noise}
        return name, Observe(name, (), {name: (probe, "width")}, probe_options, True)
    name = "representation"
    own_options = {"samples": samples, "noise": noise}
    return name, Observe(name, (), {name: (samples, "width")}, own_options)


def _self_weighted_mixing(fixed: float | None, aside: float, absent_keep: bool) -> Mixing:
    """Return the mixing in which a client's model is w times its own plus 1 - w times the mean of all.

    w is `fixed` for all clients or, if that is None, learned by each client on the share `aside` of its images, for
    which requests also carry the mean. `absent_keep`: clients outside the cohort keep their model.
    """

    def matrix(answers: Answers) -> Tensor:
        """Return the similarity matrix (m, m) whose mixture gives each client its self-weight."""
        if fixed is not None:
            weights = [fixed] * len(answers.clients)
        else:
            weights = [scalars["self_weight"] for scalars in answers.scalars]
        return self_weights.self_weight_similarity(torch.tensor(weights), answers.examples)

    if fixed is not None:
        return Mixing("mixture:learned", matrix, (), absent_keep)
    observation = Observe("self_weight", ("self_weight",), options={"aside": aside})
    return Mixing("mixture:learned", matrix, (observation,), absent_keep, sends_mean=True)


@in_range
def fedshibu(
    similarity: Similarity = "cka_linear",
    constant: Unit = 1.0,
    samples: Few = 64,
    absent: Literal["keep", "mean"] = "keep",
    probe: Probe = 256,
    noise: NotNegative = 0.0,
    self_weight: Unit | None = None,
    aside: Inner = 0.2,
    **slots: Any,
) -> Algorithm:
    """One body per client, mixed by representation similarity; the head is frozen. Constant 1 is FedBABU.

    As published, a similarity compares rows of different images: each client represents itself by images of its own.
    CKA is defined for two networks on the same rows; on others it does not tell who holds the same classes, and acts as
    a weight of the own model. `fedshibu_probe` compares on shared images.

    Unlike the source: a similarity is multiplied by the other client's number of images.

    Args:
        similarity: how clients are compared; cka_shuffled: a control, CKA with rows in random orders; groups: 1 with
            a class in common, else 0; learned: the self-weight that is best on images each client sets aside
        constant: similarity=constant: the similarity of any two clients
        samples: images each client represents itself by
        absent: model of the clients outside the cohort: their own, or the mean of the others
        probe: shared probe images, from validation
        noise: standard deviation of the noise on representations; rows are scaled to length one first
        self_weight: similarity=learned: the same fixed weight for all clients instead
        aside: similarity=learned: share of a client's images that it is learned on
    """
    made = vary(fedbabu(**slots), name="fedshibu")
    return _mixed(made, similarity, constant, samples, absent, probe, noise, self_weight, aside)


@in_range
def fedshibu_probe(
    absent: Literal["keep", "mean"] = "keep", probe: Probe = 256, noise: NotNegative = 0.0, **slots: Any
) -> Algorithm:
    """FedSHIBU with CKA on images that all clients share, so that row r is the same image in both networks.

    Args:
        absent: model of the clients outside the cohort: their own, or the mean of the others
        probe: shared probe images, from validation
        noise: standard deviation of the noise on representations; rows are scaled to length one first
    """
    made = fedshibu(similarity="probe_cka", absent=absent, probe=probe, noise=noise, **slots)
    return vary(made, name="fedshibu_probe")


@in_range
def fedavg_crsm(
    similarity: Similarity = "cka_linear",
    constant: Unit = 1.0,
    samples: Few = 64,
    absent: Literal["keep", "mean"] = "keep",
    probe: Probe = 256,
    noise: NotNegative = 0.0,
    self_weight: Unit | None = None,
    aside: Inner = 0.2,
    **slots: Any,
) -> Algorithm:
    """One model per client, head and all, mixed by representation similarity. Everything trains; constant 1 is FedAvg.

    As with `fedshibu`, similarities but `probe_cka` compare rows of different images.

    Unlike the source: a similarity is multiplied by the other client's number of images.

    Args:
        similarity: how clients are compared; cka_shuffled: a control, CKA with rows in random orders; groups: 1 with
            a class in common, else 0; learned: the self-weight that is best on images each client sets aside
        constant: similarity=constant: the similarity of any two clients
        samples: images each client represents itself by
        absent: model of the clients outside the cohort: their own, or the mean of the others
        probe: shared probe images, from validation
        noise: standard deviation of the noise on representations; rows are scaled to length one first
        self_weight: similarity=learned: the same fixed weight for all clients instead
        aside: similarity=learned: share of a client's images that it is learned on
    """
    made = vary(fedavg(**{"trainable": everything(), **specified(slots)}), name="fedavg_crsm", own_kind=True)
    return _mixed(made, similarity, constant, samples, absent, probe, noise, self_weight, aside)


def local_only(**slots: Any) -> Algorithm:
    """Every client trains alone and shares nothing: the baseline that federated learning has to beat."""
    alone = Mixing(
        "alone",
        lambda answers: torch.eye(len(answers.clients), dtype=torch.float64),
        provides=frozenset({Capability.STABLE_MODEL, Capability.PERSONAL_MODELS}),
    )
    return vary(fedavg(**slots), name="local_only", aggregate=alone)


def fedper(**slots: Any) -> Algorithm:
    """Arivazhagan et al. 2019: a common body, a private head, trained together."""
    return vary(
        fedavg(**{"trainable": everything(), **specified(slots)}), name="fedper", client_state=ClientState(is_head)
    )


def fedrep(**slots: Any) -> Algorithm:
    """Collins et al. 2021: a private head trained first, then the common body.

    Unlike the paper's: head and body take equally many steps.
    """
    return vary(fedper(**slots), name="fedrep", client_state=ClientState(is_head, alternate=True))


@in_range
def ditto(pull: NotNegative = 0.1, **slots: Any) -> Algorithm:
    """Li et al. 2021: beside the common model each client trains its own, pulled towards it.

    Args:
        pull: strength of the pull of the personal model towards the common one
    """
    return vary(fedavg(**slots), name="ditto", client_state=ClientState(second_model=pull))


def fedbn(**slots: Any) -> Algorithm:
    """Li et al. 2021: normalisation layers, weights and statistics, stay with the clients; without any it is FedAvg."""
    return vary(
        fedavg(**{"trainable": everything(), **specified(slots)}),
        name="fedbn",
        client_state=ClientState(is_normalisation, within=True),
    )


def is_normalisation(network: Network, name: str) -> bool:
    """Return whether a parameter or statistic belongs to a normalisation layer of any kind."""
    module = network.get_submodule(name.rpartition(".")[0])
    return "norm" in type(module).__name__.lower()


@in_range
def fedala(rate: NotNegative = 1.0, share: Share = 0.8, blocks: Count = 1, **slots: Any) -> Algorithm:
    """Zhang et al. 2023: each client starts from a learned blend of its last model and the common one; rate 0: FedAvg.

    Unlike the paper's: evaluated with the weights learned in the round the client last trained in.

    Args:
        rate: step size of the learned start
        share: share of the images that it is learned on
        blocks: last blocks that are blended
    """
    return vary(fedavg(**slots), name="fedala", client_state=ClientState(start=AdaptiveStart(rate, share, blocks)))


@in_range
def ifca(clusters: Count = 2, **slots: Any) -> Algorithm:
    """Ghosh et al. 2020: several common models, each client trains the one of least loss; one cluster is FedAvg.

    Args:
        clusters: number of common models
    """
    return vary(fedavg(**slots), name="ifca", aggregate=Clusters(clusters))
